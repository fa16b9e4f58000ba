"""Two real processes over gloo: one rank's trouble must never let the ranks drift apart."""

import pytest
from helpers import ranks


def run(case, world=2):
    return ranks.run("rank_job.py", world, case)


def causes(told):
    return [row[1] for row in told["rows"]]


@pytest.mark.parametrize("trouble", ["nan", "inf"])
def test_with_a_process_group_all_ranks_agree_on_everything(trouble):
    """No gradient is averaged here: only the agreement can have told rank 0."""
    a, b = run(f"group-{trouble}")
    assert a["rows"] == b["rows"]
    bad = "LOSS_NONFINITE" if trouble == "nan" else "OVERFLOW"
    assert [c for c in causes(a) if c != "NONE"] == [bad]
    assert causes(a)[2] == bad
    scale = 2.0**10 if trouble == "nan" else 2.0**9
    assert a["rows"][2][2] == scale


@pytest.mark.parametrize("trouble", ["nan", "inf"])
def test_ddp_without_a_group_treats_it_as_torch_does(trouble):
    """The average spreads the NaN; nobody trusts its own loss alone, so all lower the scale."""
    a, b = run(f"{trouble}-ddp")
    assert a["rows"] == b["rows"]
    assert a["weights"] == b["weights"]
    assert causes(a)[2] == "UNKNOWN_NONFINITE"
    assert a["rows"][2][2] == 2.0**9


def test_ddp_with_a_group_distinguishes_a_non_finite_loss_from_an_overflow():
    a, b = run("group-nan-ddp")
    assert a["rows"] == b["rows"]
    assert a["weights"] == b["weights"]
    assert causes(a)[2] == "LOSS_NONFINITE"
    assert a["rows"][2][2] == 2.0**10


@pytest.mark.parametrize("case", ["group-retry-inf", "retry-inf-ddp"])
def test_a_retry_is_collective(case):
    a, b = run(case)
    assert a["rows"] == b["rows"]
    assert a["calls"] == b["calls"] == 8 + 3  # 2^10 -> 2^7
    assert a["rows"][2] == [True, "NONE", a["rows"][2][2], 3]


def test_a_world_of_one_uses_its_loss():
    (only,) = run("group-nan", world=1)
    assert set(causes(only)) == {"NONE"}  # the trouble is rank 1's


def scales(told):
    return [row[2] for row in told["rows"]]


def test_what_one_rank_probes_is_known_to_all_of_a_group():
    """Only rank 1 looks inside its network; without that, both would choose a larger scale."""
    plain, _ = run("auto-group-quiet")
    a, b = run("auto-group-quiet-probe")
    assert a["rows"] == b["rows"]
    assert scales(a)[-1] < scales(plain)[-1]


def test_without_a_group_a_probe_on_one_rank_does_not_make_them_drift_apart():
    a, b = run("auto-quiet-probe-ddp")
    assert a["rows"] == b["rows"]


def test_auto_allows_for_the_averaging_of_gradients():
    a, b = run("auto-quiet-ddp")
    assert "replicas=2" in a["rule"]
    assert a["rows"] == b["rows"]
