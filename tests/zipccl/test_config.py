"""The "zipccl" section: what is accepted, what is refused, and how clearly."""
import json
from pathlib import Path

import pytest

from ds_zipccl.config import CollectiveChoices, ZipcclConfig
from zipscape.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_one_word_sets_all_collectives():
    config = ZipcclConfig.from_section({"enabled": True, "collectives": "always"})
    assert set(config.collectives.model_dump().values()) == {"always"}


def test_choice_per_collective_keeps_the_others_default():
    config = ZipcclConfig.from_section({"collectives": {"reduce_scatter": "never"}})
    assert config.collectives == CollectiveChoices(reduce_scatter="never")
    assert config.collectives.all_gather == "adaptive"


@pytest.mark.parametrize("section, words", [
    ({"min_bytez": 1}, ["min_bytez", "unknown field", "min_bytes"]),
    ({"min_bytes": -1}, ["min_bytes = -1", "greater than or equal to 0"]),
    ({"min_bytes": "1024"}, ["min_bytes = '1024'", "integer"]),
    ({"min_bytes": True}, ["min_bytes = True", "integer"]),
    ({"enabled": "yes"}, ["enabled = 'yes'", "boolean"]),
    ({"level": 3}, ["level = 3", "1 or 2"]),
    ({"level": 2, "window": "sigma"}, ['window "sigma"', "level 2"]),
    ({"collectives": "sometimes"}, ["collectives.all_gather = 'sometimes'", "'adaptive', 'always' or 'never'"]),
    ({"collectives": "auto"}, ["'auto'", "'adaptive'"]),
    ({"collectives": {"all_gater": "always"}}, ["collectives.all_gater", "unknown field", "all_gather"]),
    ({"kernels": "avx"}, ["kernels = 'avx'", "'reference'"]),
    ({"window": "mean"}, ["window = 'mean'", "'block' or 'sigma'"]),
    ({"max_workspace_bytes": 5}, ["max_workspace_bytes = 5", "1048576"]),
    ({"min_bytes": -1, "log": 3}, ["min_bytes = -1", "log = 3"]),
])
def test_wrong_fields_are_named_with_value_and_allowed(section, words):
    with pytest.raises(ConfigError) as error:
        ZipcclConfig.from_section(section)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("section", [True, [], "always", None])
def test_section_that_is_no_object(section):
    with pytest.raises(ConfigError, match="JSON object"):
        ZipcclConfig.from_section(section)


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ZipcclConfig().min_bytes = 3


def test_fingerprint_covers_everything_but_the_log():
    base = ZipcclConfig()
    assert base.fingerprint() == ZipcclConfig(log="x.jsonl").fingerprint()
    changed = [ZipcclConfig(enabled=True), ZipcclConfig(min_bytes=5), ZipcclConfig(kernels="cpu"), ZipcclConfig(integrity="checksum"),
               ZipcclConfig(deterministic_reduce=False),
               ZipcclConfig(collectives="never"), ZipcclConfig(max_workspace_bytes=1 << 21)]
    assert len({base.fingerprint(), *(c.fingerprint() for c in changed)}) == 1 + len(changed)


def test_every_field_is_documented_in_the_docs():
    text = (ROOT / "docs" / "config.md").read_text()
    for field in [*ZipcclConfig.model_fields, *CollectiveChoices.model_fields]:
        assert f"`{field}`" in text, field


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.name)
def test_shipped_configs_parse(path):
    document = json.loads(path.read_text())
    if "zipccl" in document:
        assert ZipcclConfig.from_section(document["zipccl"]).enabled
