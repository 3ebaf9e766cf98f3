"""Cases run on every rank by test_reports.py: what DeepSpeed's own tools show of zipped training."""
import csv
import tempfile
from pathlib import Path

import deepspeed
import deepspeed.comm as deepspeed_dist
import torch
import torch.distributed as dist

from ds_zipccl.backend import deepspeed_hooks
from tests.train.zero_cases import ZIPPED, Net, settings

AG = "all_gather_into_tensor"


def _engine(zipccl=ZIPPED, **extra):
    torch.manual_seed(0)
    model = Net()
    config = settings(3, "bf16", **({"zipccl": zipccl} if zipccl else {}), **extra)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _step(engine) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randint(61, (4, 8))))
        engine.step()


def case_monitor_gets_our_series(rank, world):
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"})
        for _ in range(3):
            _step(engine)
        if rank == 0:
            series = {}
            for path in Path(folder).rglob("*zipccl*.csv"):
                series[path.stem] = [row for row in csv.reader(path.open())][1:]
            assert {name.split("zipccl_")[-1] for name in series} == {
                "ratio", "raw_bytes", "wire_bytes", "calls_zipped", "calls_native", "overflows"}, series.keys()
            ratio = next(rows for name, rows in series.items() if name.endswith("ratio"))
            assert len(ratio) == 3 and all(1.1 < float(value) < 1.42 for _, value in ratio), ratio
            assert [int(samples) for samples, _ in ratio] == [8 * world * step for step in (1, 2, 3)], ratio
        engine.destroy()
    deepspeed_hooks.deactivate()


def case_comms_logger_shows_our_calls(rank, world):
    """C91: ops keep their names, sizes are logical, wire bytes are added; stopping and resetting work."""
    logger, tables = deepspeed_dist.comm.comms_logger, []
    for zipccl in (None, ZIPPED):
        engine = _engine(zipccl, comms_logger={"enabled": True, "verbose": False, "prof_all": True})
        _step(engine)
        logger.reset_data()
        _step(engine)
        result = deepspeed_dist.log_summary(return_dict=True)
        tables.append({op: {size: entry["count"] for size, entry in sizes.items()} for op, sizes in result["summary"].items()})
        if zipccl is None:
            engine.destroy()
    assert tables[0] == tables[1] and {AG, "reduce_scatter_tensor"} <= tables[0].keys(), "other names, sizes or counts than natively"
    for op in (AG, "reduce_scatter_tensor"):
        ours = result["zipccl"][op]
        assert sum(tables[1][op].values()) == ours["calls_zipped"] + ours["calls_native"] and ours["calls_zipped"] > 0, (op, ours)
        assert sum(ours["native_reasons"].values()) == ours["calls_native"], ours
        assert 1.1 < ours["ratio"] < 1.42 and ours["ratio"] == round(ours["raw_bytes"] / ours["wire_bytes"], 4), ours
    logger.stop_profiling_comms()
    before = logger.get_total_operations()
    _step(engine)
    assert logger.get_total_operations() == before
    deepspeed_hooks.deactivate()
    assert "zipccl" not in logger.log_all(print_log=False, return_dict=True)
    logger.enabled = False
    logger.reset_data()
    engine.destroy()
    dist.barrier()
