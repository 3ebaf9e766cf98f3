"""benchmarks/scaling.py: what it runs, and that a command that fails is a row and not a gap."""
import json

from benchmarks import scaling


def test_a_command_that_fails_is_a_row_with_its_reason():
    rows = scaling.measure("step", ["bench", "step", "--device", "cpu", "--ranks", "2", "--models", "huge"], {}, 60)
    assert len(rows) == 1 and rows[0]["error"].startswith("status 2") and "huge" in rows[0]["error"]
    assert rows[0]["command"].startswith("ds_zipccl bench step")


def test_a_command_that_does_not_end_is_a_row_with_its_reason():
    assert "not done after" in scaling.measure("step", ["report"], {}, 1)[0]["error"]
    assert "left out" in scaling.measure("step", ["report"], {}, 0)[0]["error"]


def test_plan_and_plot(tmp_path, monkeypatch):
    calls = []

    def measure(kind, arguments, environment, limit):
        calls.append((kind, arguments, environment))
        ranks = int(arguments[arguments.index("--ranks") + 1])
        if kind == "step":
            return [{"op": "step", "stage": 3, "run": "native", "time_us": 100.0 * ranks, "speedup": None},
                    {"op": "step", "stage": 3, "run": "zipped", "rival": "native", "time_us": 80.0, "speedup": 1.25, "losses": "equal"}]
        return [{"op": "all_gather_into_tensor", "impl": "ours", "bytes": 64 << 20, "in_place": False, "speedup": 1.3, "wrong": 3}]

    monkeypatch.setattr(scaling, "measure", measure)
    arguments = ["--device", "cpu", "--ranks", "2,4", "--transports", "as_is,sockets", "--out", str(tmp_path)]
    assert scaling.main(arguments) == 1                         # wrong elements are an error
    assert len(calls) == 2 * 2 * 2 and {c[2].get("NCCL_SHM_DISABLE") for c in calls} == {None, "1"}
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert {(row["ranks"], row["transport"]) for row in rows} == {(r, t) for r in (2, 4) for t in ("as_is", "sockets")}
    plot = tmp_path / "scaling.png"
    assert plot.stat().st_size > 5000
    plot.unlink()
    assert scaling.main(["--plot", str(tmp_path / "scaling.json"), "--out", str(tmp_path)]) == 0 and plot.stat().st_size > 5000
