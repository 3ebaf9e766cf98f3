"""docs/config.md: the tables of settings say what the code takes: every field, its default, words and range; so do the JSON examples."""
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from ds_scape.config import AdamSParams, GroupParams, ScapeParams
from ds_scape.config import parse as parse_scape
from ds_zipccl.config import CollectiveChoices, ZipcclConfig
from zipscape.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = (ROOT / "docs" / "config.md").read_text()


def table_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = CONFIG[CONFIG.index(heading):].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows[2:]


ZIPCCL = {row[0].strip("-` "): row for row in table_of("## `zipccl`")}
SCAPE = {row[0].strip("` "): row for row in table_of("## SCAPE: `optimizer.params`")}
CHOICES = set(CollectiveChoices.model_fields)


def bounds(field) -> dict:
    return {kind: getattr(limit, kind) for limit in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(limit, kind)}


def test_the_zipccl_table_has_every_field_and_no_other():
    assert set(ZIPCCL) == set(ZipcclConfig.model_fields) | CHOICES


@pytest.mark.parametrize("name", sorted(ZIPCCL))
def test_defaults_of_the_zipccl_table(name):
    stated = json.loads(ZIPCCL[name][2].strip("`"))
    real = (CollectiveChoices() if name in CHOICES else ZipcclConfig()).model_dump()[name]
    if name == "collectives":
        stated = dict.fromkeys(CHOICES, stated)
    assert stated == real and type(stated) is type(real)


@pytest.mark.parametrize("name", sorted(set(ZIPCCL) - CHOICES - {"collectives"}))
def test_words_and_ranges_of_the_zipccl_table(name):
    field, kind = ZipcclConfig.model_fields[name], ZIPCCL[name][1]
    if words := get_args(field.annotation)[:-1] if field.annotation == str | None else get_args(field.annotation):
        if str not in words:
            assert [json.loads(word.strip("`")) for word in kind.split(", ")] == list(words)
    elif field.annotation is bool:
        assert kind == "true, false"
    else:
        low, high = re.match(r"integer, (\S+) to (2\^\d+)[;]", kind).groups()
        assert bounds(field) == {"ge": number(low), "le": number(high)}


def number(text: str) -> int:
    base, _, power = text.partition("^")
    return int(base) ** int(power or 1)


def test_the_scape_table_has_every_field_and_no_other():
    assert set(SCAPE) == set(ScapeParams.model_fields) | set(AdamSParams.model_fields) | {"sparsity"}


@pytest.mark.parametrize("name", sorted(set(SCAPE) - {"sparsity"}))
def test_defaults_of_the_scape_table(name):
    model = ScapeParams if name in ScapeParams.model_fields else AdamSParams
    value = json.loads(SCAPE[name][2].strip("`"))
    assert getattr(model(**{name: value}), name) == getattr(model(), name)
    assert (SCAPE[name][3] == "yes") == (name in GroupParams.model_fields or name in ("density", "bias_correction"))


SETTINGS = [(page.name, text) for page in PAGES for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)]


@pytest.mark.parametrize("text", [text for _, text in SETTINGS], ids=[page for page, _ in SETTINGS])
def test_json_in_the_docs_is_accepted(text):
    document = json.loads(text)
    if "zipccl" in document:
        assert ZipcclConfig.from_section(document["zipccl"]).enabled
    if "optimizer" in document:
        parse_scape(document["optimizer"]["params"])
    assert "zipccl" in document or "optimizer" in document


def test_nothing_else_is_accepted():
    """What the two models refuse, by name; else the test above says little."""
    with pytest.raises(ConfigError, match="min_bytez"):
        ZipcclConfig.from_section({"min_bytez": 1})
    with pytest.raises(ConfigError, match="densty"):
        parse_scape({"densty": 0.1})
