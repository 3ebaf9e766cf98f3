"""benchmarks/scaling.py: what it runs, and what it makes of the rows."""
import json

from benchmarks import commands, scaling


def test_plan_and_plot(tmp_path, monkeypatch):
    calls = []

    def measure(kind, arguments, environment, limit):
        calls.append((kind, arguments, environment))
        ranks = int(arguments[arguments.index("--ranks") + 1])
        if kind == "step":
            native = {"op": "step", "stage": 3, "run": "native", "time_us": 100.0 * ranks, "speedup": None}
            return {"rows": [native, native | {"run": "zipped", "rival": "native", "time_us": 80.0, "speedup": 1.25, "losses": "equal"}]}
        return {"rows": [{"op": "all_gather_into_tensor", "impl": "ours", "bytes": 64 << 20, "in_place": False, "speedup": 1.3,
                          "wrong": 3}]}

    monkeypatch.setattr(scaling, "measure", measure)
    arguments = ["--device", "cpu", "--ranks", "2,4", "--transports", "as_is,sockets", "--out", str(tmp_path)]
    assert scaling.main(arguments) == 1                         # wrong elements are an error
    assert len(calls) == 2 * 2 * 2 and {tuple(call[1][:3]) for call in calls} == {(*commands.DS_ZIPCCL, "bench")}
    assert {c[2].get("NCCL_SHM_DISABLE") for c in calls} == {None, "1"}
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert {(row["ranks"], row["transport"]) for row in rows} == {(r, t) for r in (2, 4) for t in ("as_is", "sockets")}
    over_calls, over_steps, efficiency = scaling.curves([*rows, {"op": "step", "error": "not done", "transport": "as_is"}])
    assert over_calls == {("all_gather_into_tensor 64 MiB", transport): {2: 1.3, 4: 1.3} for transport in ("as_is", "sockets")}
    assert over_steps == {("ZeRO-3 zipped", transport): {2: 1.25, 4: 1.25} for transport in ("as_is", "sockets")}
    assert efficiency["ZeRO-3 native", "sockets"] == {2: 1.0, 4: 0.5} and efficiency["ZeRO-3 zipped", "as_is"] == {2: 1.0, 4: 1.0}
    plot = tmp_path / "scaling.png"
    assert plot.stat().st_size > 5000
    plot.unlink()
    assert scaling.main(["--plot", str(tmp_path / "scaling.json"), "--out", str(tmp_path)]) == 0 and plot.stat().st_size > 5000
