"""DeepSpeed ZeRO 1, 2, 3 through the zipped front, on gloo: bit-equal to native at 2 ranks, the documented sum beyond."""
import pytest

from tests.helpers.ranks import assert_ok

MODULE = "tests.train.zero_cases"
CASES = ("case_stage_1_fp32", "case_stage_1_bf16", "case_stage_2_fp32", "case_stage_2_bf16", "case_script_without_section",
         "case_script_without_section_and_without_store", "case_second_engine_with_other_section_is_refused",
         "case_second_engine_may_differ_in_the_log", "case_wrong_section_on_one_rank_is_an_error_on_all",
         "case_unforeseen_failure_on_one_rank_is_an_error_on_all", "case_native_collectives_work_and_are_counted",
         "case_destroy_of_a_group_of_others", "case_fp32_accumulation_in_deepspeeds_bf16_optimizer", "case_deepcompile_is_warned_of",
         "case_stage_0_with_parameters_without_elements", "case_stage_3_fp32", "case_stage_3_bf16", "case_stage_3_uses_the_rank_order_sum",
         "case_flipped_bit_changes_training", "case_shipped_configs_train", "case_new_process_group_starts_afresh")
BEYOND_TWO = ("case_stage_1_bf16", "case_stage_2_bf16", "case_stage_3_fp32", "case_stage_3_bf16", "case_stage_3_uses_the_rank_order_sum")
DELIVERY = ("case_one_bucket_behind", "case_two_buckets_behind", "case_no_more_than_memory_allows", "case_one_bucket_for_all",
            "case_sums_have_memory_of_their_own",
            "case_lent_memory_is_not_waited_for", "case_sums_of_another_type_are_not_late", "case_large_buckets_are_not_late")


@pytest.mark.parametrize("case", DELIVERY)
def test_when_buckets_are_delivered(case):
    assert_ok("tests.train.zero3_reduce_cases", DELIVERY, 2, case)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case):
    assert_ok(MODULE, CASES, 2, case)


def test_one_rank():
    assert_ok(MODULE, ("case_world_of_one",), 1, "case_world_of_one")


@pytest.mark.parametrize("case", BEYOND_TWO)
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(world_size, case):
    assert_ok(MODULE, BEYOND_TWO, world_size, case)
