"""What SCAPE does not work with, found when the engine is built: one list, one error, before anything is communicated."""
from torch import nn

from zipscape.errors import ConfigError, describe


def check_last_group(optimizer) -> None:
    """Raises ConfigError for parameters that are not real floating-point tensors; the group is then taken out again."""
    wrong = [p.dtype for p in optimizer.param_groups[-1]["params"] if not p.is_floating_point()]
    if wrong:
        optimizer.param_groups.pop()
        raise ConfigError(describe(f"{type(optimizer).__name__} trains real floating-point parameters", got=f"one of {wrong[0]}",
                                   todo="keep complex parameters as two real ones (torch.view_as_real)"))


def check_engine(engine, sequence_parallel_size: int, tensor_parallel_size: int) -> None:
    """Raises ConfigError naming every setting of a DeepSpeedEngine that SCAPE cannot be combined with (table: docs/scape.md)."""
    found = [text for wrong, text in _table(engine, sequence_parallel_size, tensor_parallel_size) if wrong]
    if found:
        raise ConfigError(describe("SCAPE cannot be combined with settings of this engine", got="; ".join(found),
                                   expected="ZeRO stage 1 or 2, data parallelism alone", where="ds_config.json",
                                   todo='change these settings, or take another optimizer ("ScapeAdamS" works with every stage)'))


def _table(engine, sequence_parallel_size, tensor_parallel_size):
    stage, zero = int(engine.zero_optimization_stage()), engine._config.zero_config
    offload = engine.zero_offload_optimizer()
    alone = engine.dp_world_size == 1 and not engine.fp16_enabled() and not engine.bfloat16_enabled()
    return (
        (stage == 0 and not alone, "zero_optimization.stage = 0: there are no partitions whose owners could choose what is sent"),
        (stage == 3, "zero_optimization.stage = 3: its parameters are gathered whole for every layer, so sending changes alone saves "
                     "nothing there; a variant for the gradients only is planned"),
        (engine.pipeline_parallelism, "pipeline parallelism"),
        (tensor_parallel_size > 1, f"tensor parallelism ({tensor_parallel_size} ranks)"),
        (sequence_parallel_size > 1, f"sequence parallelism ({sequence_parallel_size} ranks)"),
        (engine.has_moe_layers, "mixture of experts: expert groups have process groups of their own"),
        (engine.zero_hpz_partition_size() > 1 or engine.zero_quantized_weights() or engine.zero_quantized_gradients(),
         "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights, zero_quantized_gradients)"),
        (engine.is_deepcompile_enabled(), "compile.deepcompile: it replaces the reduction of gradients"),
        (any(m.sparse for m in engine.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)),
         "sparse gradients: an embedding with sparse = True"),
        (bool(engine.zenflow), "zero_optimization.zenflow"),
        (engine.torch_autocast_enabled(), "torch_autocast: use the bf16 or fp16 section"),
        (offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme", "offload_optimizer.device = nvme"),
        (zero.elastic_checkpoint, "zero_optimization.elastic_checkpoint"),
        (engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients() or engine.bf16_optimizer_states(),
         "master weights or optimizer states of 16 bits"),
        (not engine.postscale_gradients() or engine.gradient_predivide_factor() != 1.0 or not engine.gradient_average,
         "prescale_gradients, gradient_predivide_factor or a gradient sum: SCAPE averages by itself"),
    )
