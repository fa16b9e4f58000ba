"""Real multi-process gloo jobs: every rank takes the same decision, in one small collective a step.

The stories are in stories_*.py; each world runs all of its stories in one job.
"""

import math
import subprocess

import pytest
from helpers.ranks import finish, run, start

from gradlift.errors import SettingsError
from gradlift.torch import GradScaler

CLEAN, OVERFLOW, BAD_LOSS = [True, "NONE"], [False, "OVERFLOW"], [False, "LOSS_NONFINITE"]
UNKNOWN = [False, "UNKNOWN_NONFINITE"]
COMMON = ["ddp", "fsdp2"]
WORLDS = {
    1: [
        *COMMON,
        "fsdp1_full_shard",
        "tensor_parallel",
        "drifted_scales",
        "two_optimizers_and_nothing_left",
        "two_optimizers_and_nothing_left_on_device",
    ],
    2: [
        *COMMON,
        "ddp_on_device",
        "ddp_without_a_group",
        "ddp_accumulates",
        "ddp_drops_a_micro_batch",
        "ddp_drops_a_micro_batch_without_a_group",
        "fsdp2_fused",
        "fsdp2_on_device",
        "fsdp2_with_a_group",
        "fsdp2_beside_torch",
        "fsdp2_unscales_first",
        "fsdp2_unscales_first_on_device",
        "fsdp2_retries",
        "fsdp2_calibrates",
        "fsdp2_has_no_masters",
        "fsdp2_half_parameters_are_refused",
        "fsdp2_drops_nothing",
        "fsdp1_full_shard",
        "fsdp1_full_shard_orig",
        "fsdp1_no_shard",
        "fsdp1_no_shard_orig",
        "fsdp1_without_a_group",
        "fsdp1_beside_torchs_sharded_scaler",
        "tensor_parallel",
        "tensor_parallel_on_device",
        "tensor_parallel_with_a_group",
        "tensor_parallel_loss",
        "tensor_parallel_drops_a_micro_batch",
        "pipeline",
        "pipeline_on_device",
        "pipeline_with_tied_weights",
        "pipeline_with_tied_weights_on_device",
        "pipeline_with_masters",
        "pipeline_auto",
        "pipeline_with_a_frozen_end",
        "pipeline_with_a_frozen_end_on_device",
        "pipeline_that_forgets_to_scale",
        "pipeline_that_forgets_to_scale_on_device",
        "pipeline_that_was_not_announced",
        "pipeline_without_a_group",
        "pipeline_drops_nothing",
        "drifted_scales",
        "drifted_scales_on_device",
        "drifted_later_on_device",
        "nothing_waits_on_device",
        "odd_answers",
        "edited_on_one_rank",
        "edited_on_one_rank_on_device",
        "drifted_counters",
        "different_orders",
        "an_extra_wrapper_is_no_difference",
        "a_view_of_some_layers_is_no_difference",
        "frozen_on_one_rank",
        "clipped_on_one_rank",
        "clipped_on_one_rank_on_device",
        "groups_that_are_none",
        "one_rank_is_a_group",
        "a_rank_without_gradients",
        "a_rank_without_gradients_on_device",
        "two_optimizers",
        "two_optimizers_on_device",
        "keys",
        "only_rank_0_records",
        "only_rank_0_records_auto",
        "only_rank_0_records_on_device",
        "masters_under_ddp",
        "masters_under_fsdp1",
        "a_rank_leaves",
        "a_rank_leaves_on_device",
        "a_rank_has_no_batch_at_all",
        "flags_reduced_by_hand",
        "flags_reduced_by_hand_on_device",
        "flags_reduced_by_a_subclass",
        "a_rank_leaves_that_accumulates",
        "a_rank_leaves_with_two_optimizers",
        "a_rank_leaves_with_old_moments",
        "a_rank_leaves_ddp_alone",
        "a_rank_leaves_and_all_are_to_stop",
        "without_a_group_a_rank_leaves_as_with_torch",
    ],
    3: [
        *COMMON,
        "some_ranks_only",
        "a_mesh_of_some_ranks",
        "ranks_leave_one_by_one",
        "a_rank_skips_a_call_inside_join",
    ],
    4: [
        *COMMON,
        "hsdp",
        "hsdp_on_device",
        "hsdp_over_one_copy",
        "hsdp_with_the_wrong_group",
        "tensor_parallel_in_fsdp2",
        "tensor_parallel_in_fsdp2_on_device",
        "tensor_parallel_in_ddp",
        "fsdp2_in_a_pipeline",
        "copies_of_a_pipeline",
        "meshes_that_cross",
        "fsdp1_hybrid_shard",
        "fsdp1_hybrid_shard_orig",
    ],
}
_told = {}


def tell(world, name):
    """What each rank said of a story."""
    if world not in _told:
        _told[world] = run("distributed_job.py", world, *WORLDS[world], timeout=300)
    said = [rank[name] for rank in _told[world]]
    for each in said:
        assert "failed" not in each, each["failed"]
    return said


def agreed(said, what="rows"):
    """What all ranks said alike."""
    assert all(each[what] == said[0][what] for each in said)
    return said[0][what]


def verdicts(rows):
    return [row[:2] for row in rows]


def scales(rows):
    return [row[2] for row in rows]


def close(norms, within=1e-6):
    """Our norms beside the truth; on a skipped step there is none."""
    known = [(ours, truth) for ours, truth in norms if not math.isnan(ours)]
    assert known
    for ours, truth in known:
        assert ours == pytest.approx(truth, rel=within)


SHARDED = [
    (2, "fsdp2"),
    (3, "fsdp2"),
    (4, "fsdp2"),
    (2, "fsdp2_fused"),
    (2, "fsdp2_on_device"),
    (2, "fsdp2_with_a_group"),
    (2, "fsdp1_full_shard"),
    (2, "fsdp1_full_shard_orig"),
    (2, "fsdp1_no_shard"),
    (2, "fsdp1_no_shard_orig"),
    (2, "fsdp1_without_a_group"),
    (4, "fsdp1_hybrid_shard"),
    (4, "fsdp1_hybrid_shard_orig"),
    (4, "hsdp"),
    (4, "hsdp_on_device"),
]
WHOLE = [(2, "ddp"), (3, "ddp"), (4, "ddp"), (2, "ddp_on_device")]


@pytest.mark.parametrize(("world", "name"), [*WHOLE, *SHARDED])
def test_what_is_bad_on_one_rank_is_skipped_by_all(world, name):
    """An overflow at step 2 and a non-finite loss at step 4, of rank 1 alone; with shards, an inf
    in one of them at step 5. One collective a step; verdict, cause, scale and first culprit
    are the same."""
    said = tell(world, name)
    common = agreed([{"rows": [row[:3] for row in each["rows"]]} for each in said])
    last, scale = (CLEAN, 128.0) if (world, name) in WHOLE else (OVERFLOW, 64.0)
    assert verdicts(common) == [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS, last]
    assert scales(common) == [256.0, 256.0, 128.0, 128.0, 128.0, scale]
    agreed([{"rows": [row[3][:1] for row in each["rows"]]} for each in said])
    assert all(row[3] for row in said[0]["rows"] if not row[0])
    assert agreed(said, "collectives") == [1]
    for each in said:
        close(each["norms"])
        assert each["weights"] == said[0]["weights"]


@pytest.mark.parametrize(("world", "name"), SHARDED)
def test_every_rank_has_the_same_norm_to_the_bit(world, name):
    said = tell(world, name)
    ours = [[n for n, _ in each["norms"] if not math.isnan(n)] for each in said]
    assert len(ours[0]) == 3
    assert all(each == ours[0] for each in ours)


def test_some_shards_are_empty_and_one_rank_has_nothing_else():
    empty = [each["empty"] for each in tell(4, "fsdp2")]
    assert empty == [0, 2, 2, 6]
    nothing = tell(4, "fsdp2")[3]
    assert nothing["rows"][5][3] == ["2.bias (inf)"]  # it was told


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1_full_shard", "tensor_parallel"])
def test_a_world_of_one_communicates_nothing(name):
    (said,) = tell(1, name)
    assert said["collectives"] == [0]
    assert verdicts(said["rows"])[:4] == [CLEAN, CLEAN, OVERFLOW, CLEAN]
    close(said["norms"])


def test_without_a_group_plain_parameters_communicate_nothing():
    said = tell(2, "ddp_without_a_group")
    rows = agreed(said)
    assert agreed(said, "collectives") == [0]
    assert [row[1] for row in rows if not row[0]] == ["UNKNOWN_NONFINITE"] * 2
    assert scales(rows)[-1] == 64.0


@pytest.mark.parametrize("how", ["by_hand", "by_hand_on_device", "by_a_subclass"])
def test_flags_that_a_script_reduces_keep_ranks_together(how):
    a, b = tell(2, f"flags_reduced_{how}")
    assert a == b
    assert [stepped for stepped, _ in a["rows"]] == [True, True, False, False, True, True]
    assert a["rows"][-1][1] == 2.0**6
    assert a["skipped"] == 2


def test_accumulation_with_no_sync_is_one_big_batch():
    said = tell(2, "ddp_accumulates")
    common = agreed([{"rows": [row[:3] for row in each["rows"]]} for each in said])
    assert verdicts(common) == [CLEAN, BAD_LOSS, OVERFLOW, CLEAN]
    assert all(each["apart"] < 1e-6 for each in said)


def test_ddp_and_its_accelerator_path_train_alike():
    rows = [tell(2, name)[0]["rows"] for name in ("ddp", "ddp_on_device")]
    assert rows[0] == rows[1]


def test_fsdp2_is_as_torch_s_scaler_and_clipping():
    for each in tell(2, "fsdp2_beside_torch"):
        assert each["apart"] < 1e-6
        ours, theirs = each["norms"]
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("name", ["fsdp2_unscales_first", "fsdp2_unscales_first_on_device"])
def test_a_norm_after_unscale_is_that_of_all_shards(name):
    said = tell(2, name)
    for each in said:
        close([each["norms"]])
        assert each["after"] == pytest.approx(0.01, rel=1e-3)
    assert agreed(said, "collectives") == 1


def test_a_retry_is_collective():
    said = tell(2, "fsdp2_retries")
    rows = agreed(said)
    assert agreed(said, "calls") == 4 + 2  # 2^8 -> 2^6
    assert rows[1] == [True, "NONE", 64.0, [], 2]


def test_calibration_is_collective():
    said = tell(2, "fsdp2_calibrates")
    assert agreed(said)[0] < 2.0**30
    assert "replicas=2" in agreed(said, "rule")


def test_dtensors_have_no_masters():
    assert "is a DTensor" in agreed(tell(2, "fsdp2_has_no_masters"), "said")
    said = agreed(tell(2, "fsdp2_half_parameters_are_refused"), "said")
    assert "MixedPrecisionPolicy" in said


@pytest.mark.parametrize(
    "name", ["tensor_parallel", "tensor_parallel_on_device", "tensor_parallel_with_a_group"]
)
def test_tensor_parallel_is_the_whole_model(name):
    """Cut, copied, partial and plain parameters beside the same model on one rank."""
    said = tell(2, name)
    rows = [row[:3] for row in said[0]["rows"]]
    assert all([row[:3] for row in each["rows"]] == rows for each in said)
    assert verdicts(rows) == [CLEAN, CLEAN, OVERFLOW, CLEAN]
    assert agreed(said, "collectives") == [1]
    for each in said:
        close(each["norms"])
        assert each["apart"] < 1e-6


def test_a_loss_that_is_spread_over_ranks():
    rows = agreed(tell(2, "tensor_parallel_loss"))
    for stepped, norm, weights in rows:
        assert stepped
        assert norm == pytest.approx(4.0)
        assert weights == [-1.0] * 4


def test_a_bad_micro_batch_is_dropped_by_all_or_none():
    assert agreed(tell(2, "tensor_parallel_drops_a_micro_batch")) == [
        *([0, 2], [1], True, "NONE", 128.0, [])
    ]
    bad_loss, overflow = agreed(tell(2, "ddp_drops_a_micro_batch"))
    assert bad_loss == [[0, 2], [1], True, "NONE", 256.0, []]
    assert overflow == [[0, 2], [1], True, "NONE", 128.0, []]
    unknown = agreed(tell(2, "ddp_drops_a_micro_batch_without_a_group"))
    assert unknown == [overflow, overflow]  # whose loss it was is not known: all lower their scale


def test_micro_batches_that_cannot_be_distinguished_are_an_error():
    assert "FSDP hands them on" in agreed(tell(2, "fsdp2_drops_nothing"), "said")
    assert "sharded=" in agreed(tell(2, "pipeline_drops_nothing"), "said")


PIPELINES = [
    "pipeline",
    "pipeline_on_device",
    "pipeline_with_tied_weights",
    "pipeline_with_tied_weights_on_device",
    "pipeline_with_masters",
    "pipeline_auto",
]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_decides_together(name):
    """Only the last stage has a loss; the first hears of it. Tied weights are counted once."""
    said = tell(2, name)
    rows = agreed(said)
    assert verdicts(rows) == [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS, CLEAN]
    if name != "pipeline_auto":
        assert scales(rows) == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
    assert agreed(said, "collectives") == [1]
    agreed(said, "rule")
    for each in said:
        close(each["norms"])
        assert each["apart"] < 1e-6


@pytest.mark.parametrize(
    "name", ["pipeline_with_a_frozen_end", "pipeline_with_a_frozen_end_on_device"]
)
def test_a_stage_without_gradients_tells_of_its_loss(name):
    assert agreed(tell(2, name)) == [[*CLEAN, 256.0], [*BAD_LOSS, 256.0]]


@pytest.mark.parametrize("on_device", [False, True])
def test_ranks_none_of_which_has_scaled_a_loss_apply_nothing(on_device):
    """A stage without a loss is fine as long as another has one."""
    told = tell(2, "pipeline_that_forgets_to_scale" + "_on_device" * on_device)
    for i, each in enumerate(told):
        assert each["said"][:2] == ["nothing", "nothing"]
        assert each["kept"] == [[0.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]]
        if i or not on_device:  # on a device the one that forgot looks, and the other skips
            assert "on ranks 0-1 no loss was scaled" in each["said"][2]


def test_a_pipeline_that_was_not_announced_is_found_out():
    said = agreed(tell(2, "pipeline_that_was_not_announced"), "said")
    assert "parameters differ: rank 0 has" in said
    assert "sharded=True" in said
    assert "process_group=" in agreed(tell(2, "pipeline_without_a_group"), "said")


@pytest.mark.parametrize("name", ["drifted_scales", "drifted_scales_on_device"])
def test_scales_that_drifted_apart_are_found_by_all(name):
    said = tell(2, name)
    by_name, at_step = agreed(said, "said")
    for words in (by_name, at_step):
        assert words.startswith("RankError: scales differ: rank 0 has 4.0, rank 1 has 8.0. ")
        assert "Load the same scaler state on every rank" in words
    assert agreed(said, "kept") == [1.0, 1.0]
    assert agreed(said, "mended") == "nothing"
    assert agreed(said) == [[True, "NONE", 4.0, []]]
    (alone,) = tell(1, "drifted_scales")
    assert alone["said"] == ["nothing", "nothing"]


def test_on_a_device_no_rank_steps_with_different_scales():
    assert agreed(tell(2, "drifted_later_on_device")) == [False, [0.0, 0.0]]


def test_on_a_device_nothing_waits_for_other_ranks():
    assert agreed(tell(2, "nothing_waits_on_device")) == [CLEAN, BAD_LOSS, CLEAN]


@pytest.mark.parametrize("name", ["edited_on_one_rank", "edited_on_one_rank_on_device"])
def test_a_bad_edit_on_one_rank_raises_there_and_writes_nothing(name):
    zero, one = tell(2, name)
    assert zero["said"] == ["nothing"] * 3
    for said in one["said"][:2]:
        assert "MisuseError: the gradient of w was changed after it had been checked" in said
        assert "and is now nan" in said
    assert one["said"][2] == "nothing"
    assert one["kept"] == [[1.0, 1.0]] * 3
    assert zero["kept"] == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_sharded_says_one_of_three_things():
    said = agreed(tell(2, "odd_answers"), "said")
    assert "SettingsError: sharded(parameter) returned 'yes', expected True" in said
    with pytest.raises(SettingsError, match="sharded is 'yes', expected True, False or a function"):
        GradScaler("cpu", sharded="yes")


def test_other_differences_are_found_by_name():
    counters, rules, switch, key = agreed(tell(2, "drifted_counters"), "said")
    assert "counters 'clean' differ: rank 0 has 1, rank 1 has 2" in counters
    assert "rules differ" in rules
    assert "growth_interval=101" in rules
    assert "switches differ: rank 0 has on, rank 1 has off" in switch
    assert "scales of 'd' differ: rank 0 has 256.0, rank 1 has 2.0" in key


def test_different_orders_are_found_by_all():
    reversed_, mended, swapped, again = agreed(tell(2, "different_orders"), "said")
    for words in (reversed_, swapped):
        assert words.startswith("RankError: parameters differ: rank 0 has ")
        assert "same order" in words
    assert mended == again == "nothing"
    wrapped = tell(2, "an_extra_wrapper_is_no_difference")
    assert agreed(wrapped, "said") == ["nothing", "nothing"]
    assert [each["kept"] for each in wrapped] == [False, True]
    viewed = tell(2, "a_view_of_some_layers_is_no_difference")
    assert agreed(viewed, "said") == "nothing"
    assert [each["kept"] for each in viewed] == [False, True]
    frozen = agreed(tell(2, "frozen_on_one_rank"), "said")
    assert frozen.startswith("RankError: parameters differ: rank 0 has ")
    assert "requires_grad" in frozen


@pytest.mark.parametrize("name", ["clipped_on_one_rank", "clipped_on_one_rank_on_device"])
def test_clipping_on_some_ranks_is_found_by_all(name):
    said = tell(2, name)
    words = agreed(said, "said")
    assert "RankError: calls differ: rank 0 has clipping, rank 1 has no clipping" in words
    assert agreed(said, "kept") == [1.0, 1.0]


def test_what_is_no_group_is_said_to_be_none():
    mesh, deaf = agreed(tell(2, "groups_that_are_none"), "said")
    assert mesh.startswith("SettingsError: the process group is a DeviceMesh")
    assert "mesh.get_group()" in mesh
    assert deaf.startswith("MisuseError: the process group cannot carry what is to be said")
    assert "cpu:gloo,cuda:nccl" in deaf


def test_a_group_of_one_communicates_nothing():
    first, second = tell(2, "one_rank_is_a_group")
    assert first["rows"][:2] == CLEAN
    assert second["rows"][:2] == UNKNOWN
    assert first["collectives"] == second["collectives"] == 0


def test_a_group_of_some_ranks_does_not_know_all_losses():
    said = tell(3, "some_ranks_only")
    assert verdicts(said[0]["rows"]) == verdicts(said[1]["rows"]) == [CLEAN, CLEAN, UNKNOWN]
    assert "not in process_group=" in said[2]["said"]


def test_copies_that_decide_separately_do_not_drift_apart():
    """Rank 1's NaN loss reaches the other copy, whose losses are finite, by the average."""
    said = tell(4, "hsdp_over_one_copy")
    rows = agreed([{"rows": [row[:3] for row in each["rows"]]} for each in said])
    assert verdicts(rows) == [CLEAN, CLEAN, UNKNOWN, CLEAN, UNKNOWN, CLEAN]
    assert scales(rows)[-1] == 64.0
    for each in said:
        close(each["norms"])


def test_copies_of_a_pipeline_count_once_and_do_not_drift_apart():
    said = tell(4, "copies_of_a_pipeline")
    rows = agreed(said)
    assert verdicts(rows[:5]) == [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS]
    assert verdicts(rows[5:]) == [CLEAN, CLEAN, UNKNOWN, CLEAN, UNKNOWN]
    for each in said:
        close(each["norms"])


@pytest.mark.parametrize("name", ["a_rank_without_gradients", "a_rank_without_gradients_on_device"])
def test_a_rank_without_gradients_takes_part(name):
    said = tell(2, name)
    for each in said:
        assert verdicts(each["rows"]) == [CLEAN, BAD_LOSS, CLEAN, BAD_LOSS]
        norms = [n for n in each["norms"] if not math.isnan(n)]
        assert norms == pytest.approx([math.sqrt(18)] * 2)
    assert said[1]["rows"][1][3] == ["parameter 0 of shape (2,) (inf)"]
    assert said[1]["rows"][3][3] == ["a parameter on another rank (inf)"]


def test_several_optimizers_and_keys():
    for name in ("two_optimizers", "two_optimizers_on_device"):
        said = tell(2, name)
        assert agreed(said) == [False, "OVERFLOW", 128.0, True]
        assert agreed(said, "collectives") == 2  # one for each optimizer
    for name in ("two_optimizers_and_nothing_left", "two_optimizers_and_nothing_left_on_device"):
        assert agreed(tell(1, name)) == [[0, 1], False, "OVERFLOW", 128.0, []]
    assert agreed(tell(2, "keys")) == [256.0, 128.0]


@pytest.mark.parametrize(
    "name", ["only_rank_0_records", "only_rank_0_records_auto", "only_rank_0_records_on_device"]
)
def test_a_journal_of_one_rank_has_the_norm_and_peak_of_all_ranks(name):
    said = tell(2, name)[0]
    assert len(said["recorded"]) == 4
    for i, (norm, amax) in enumerate(said["recorded"]):
        assert amax == pytest.approx(said["peaks"][i])
        if i or name == "only_rank_0_records":  # others hear at the first step that it is wanted
            assert norm == pytest.approx(said["truth"][i], rel=1e-6)
    assert said["samples"] == 2


def test_masters_in_a_group():
    said = tell(2, "masters_under_ddp")
    rows = agreed([{"rows": repr(each["rows"])} for each in said])
    assert "OVERFLOW" in rows
    agreed(said, "weights")
    said = tell(2, "masters_under_fsdp1")
    assert verdicts(agreed(said)) == [CLEAN, CLEAN, OVERFLOW, CLEAN]
    close(said[0]["norms"])


def test_a_group_that_lacks_some_parts_is_refused():
    for each in tell(4, "hsdp_with_the_wrong_group"):
        assert "MisuseError: parameters are cut into parts that lie on ranks" in each["said"]
        close(each["norms"])  # a group with one copy of each part will do


@pytest.mark.parametrize("name", ["tensor_parallel_in_fsdp2", "tensor_parallel_in_fsdp2_on_device"])
def test_a_mesh_in_a_mesh_is_one_collective(name):
    said = tell(4, name)
    rows = [row[:3] for row in said[0]["rows"]]
    assert all([row[:3] for row in each["rows"]] == rows for each in said)
    assert verdicts(rows) == [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS]
    assert agreed(said, "collectives") == [1]
    for each in said:
        close(each["norms"])


def test_tensor_parallel_in_ddp_counts_each_copy_once():
    """Over its own mesh alone a rank cannot know all losses; given all ranks it does."""
    said = tell(4, "tensor_parallel_in_ddp")
    rows = agreed(said)
    assert verdicts(rows[:5]) == [CLEAN, CLEAN, UNKNOWN, CLEAN, UNKNOWN]
    assert verdicts(rows[5:]) == [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS]
    for each in said:
        close(each["norms"])


def test_a_pipeline_of_shards():
    said = tell(4, "fsdp2_in_a_pipeline")
    together = [each["rows"][:3] for each in said]
    assert verdicts(together[0]) == [CLEAN, CLEAN, OVERFLOW]
    assert all(rows == together[0] for rows in together)
    for each in said:
        close(each["norms"])


def test_meshes_that_cross_are_one_collective():
    said = tell(4, "meshes_that_cross")
    for each in said:
        close([each["norms"]])
    assert agreed(said, "collectives") == 1


def test_a_mesh_of_some_ranks_makes_its_own_group():
    first, second, third = tell(3, "a_mesh_of_some_ranks")
    assert first["rows"] == second["rows"]
    assert [row[1] for row in first["rows"]] == ["UNKNOWN_NONFINITE"] * 2
    assert third["rows"] == []


# Uneven inputs

LEAVERS = [
    (2, "a_rank_leaves", [2, 6]),
    (2, "a_rank_leaves_on_device", [2, 6]),
    (2, "a_rank_has_no_batch_at_all", [0, 3]),
    (2, "a_rank_leaves_that_accumulates", [1, 3]),
    (2, "a_rank_leaves_with_two_optimizers", [1, 3]),
    (3, "ranks_leave_one_by_one", [1, 3, 6]),
]


@pytest.mark.parametrize(("world", "name", "batches"), LEAVERS)
def test_ranks_with_fewer_batches_leave_and_nobody_waits(world, name, batches):
    """The last rank's troubles come when others have left; at the end all are alike again."""
    said = tell(world, name)
    assert [each["inside"] for each in said] == batches
    rows = [CLEAN, CLEAN, OVERFLOW, CLEAN, BAD_LOSS, CLEAN][: max(batches)]
    assert verdicts(said[-1]["rows"]) == [*rows, CLEAN]
    assert agreed(said, "steps") == max(batches) + 1
    assert agreed(said, "scale") == 128.0
    agreed(said, "weights")
    assert agreed(said, "enabled") is False  # later passes are as if it had not been
    assert max(each["seconds"] for each in said) < 60  # the group's timeout is 120


def test_without_a_group_join_still_gives_all_ranks_one_state():
    said = tell(2, "without_a_group_a_rank_leaves_as_with_torch")
    agreed(said, "weights")
    assert agreed(said, "state") == 3


def test_moments_of_a_rank_that_left_are_old_and_it_says_so():
    left, last = tell(2, "a_rank_leaves_with_old_moments")
    assert "load it from rank 1" in left["said"][0]
    assert last["said"] == []


def test_ddp_s_own_join_is_refused_at_the_first_step():
    said = tell(2, "a_rank_leaves_ddp_alone")
    at_step, both, bare = agreed(said, "said")
    assert at_step.startswith("MisuseError: a rank that leaves model.join() cannot take part")
    assert "`with scaler.join(model):`" in at_step
    assert "`with scaler.join(model):`" in both
    assert "wants a DistributedDataParallel, this is Sequential" in bare
    assert agreed(said, "kept") is True


def test_a_rank_that_leaves_may_stop_all():
    said = tell(2, "a_rank_leaves_and_all_are_to_stop")
    assert [each["said"] for each in said] == [
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]
    assert agreed(said, "steps") == 3  # and go on together


def test_a_missing_call_inside_join_is_found_by_all():
    said = tell(3, "a_rank_skips_a_call_inside_join")
    words = [each["said"] for each in said]
    calls = "calls differ: rank 0 has a step, rank 1 has the next forward pass. Inside scaler.join"
    assert [w.partition(" calls")[0] for w in words] == [
        "RankError: step():",
        "RankError: scaler.join():",
        "RankError: scaler.join():",
    ]
    assert all(calls in w for w in words)
    assert [each["steps"] for each in said] == [1, 1, 1]


# Bad weather


@pytest.mark.parametrize(("case", "least", "most"), [("dies", 0.0, 30.0), ("hangs", 4.5, 30.0)])
def test_a_lost_rank_is_an_error_in_words(case, least, most):
    """No later than the group's timeout of 5 seconds; nothing is stepped, nothing half done."""
    said, _ = run("weather_job.py", 2, case)
    told = "RankError: step(): ranks 0-1 could not agree; the collective failed"
    assert said["said"].startswith(told)
    assert "Restart from the last checkpoint" in said["said"]
    assert said["from"] == "RuntimeError"
    assert least <= said["seconds"] <= most
    assert said["kept"] == [-1.0] * 3  # of the first step
    assert said["windows"] == 0


def test_a_missing_call_is_an_error_on_every_rank_and_never_a_drift():
    """Within the timeout of 5 seconds; a straggler before it is no error."""
    zero, one = run("weather_job.py", 2, "skips")
    told = "RankError: unscale_(): ranks 0-1 could not agree; the collective failed after"
    assert zero["said"].startswith(told)
    assert one["said"].startswith("RuntimeError: ")  # in the backward pass: torch's own words
    assert (zero["steps"], one["steps"]) == (2, 2)
    assert zero["kept"] is one["kept"] is True


def test_groups_that_were_destroyed_and_made_again():
    said = run("weather_job.py", 2, "made-again")
    rows = agreed(said)
    assert verdicts(rows) == [CLEAN] * 3 + [BAD_LOSS, CLEAN] + [CLEAN, BAD_LOSS] + [CLEAN] * 2
    assert "was destroyed" in agreed(said, "between")
    assert "set scaler.process_group" in agreed(said, "stale")
    assert agreed(said, "without") is True
    before, after = agreed(said, "rules")
    assert "replicas=2" in before
    assert "replicas" not in after


def test_fork_after_import():
    (said,) = run("weather_job.py", 1, "forked")
    first, second = said["rows"]
    assert first == second
    assert verdicts(first) == [CLEAN, BAD_LOSS]


def test_no_process_is_left_behind(tmp_path):
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time; time.sleep(600)")
    jobs = start(sleeper, 2)
    with pytest.raises(subprocess.TimeoutExpired):
        finish(jobs, timeout=0.5)
    assert all(job.poll() is not None for job in jobs)


def test_fsdp1_is_as_with_torchs_sharded_scaler():
    for rows in tell(2, "fsdp1_beside_torchs_sharded_scaler"):
        scales, weights = rows["ours"]
        assert scales == [2.0**8, 2.0**9, 2.0**9, 2.0**8, 2.0**8, 2.0**9]
        assert rows["torch"] == rows["ours"]
        assert rows["ddp"][0] == scales
        for mine, theirs in zip(weights, rows["ddp"][1], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)  # sums of two ranks in another order
