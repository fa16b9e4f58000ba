"""Faults in the MXNet adapter, and in what watches a script."""

from __future__ import annotations

from .mutant import Mutant

MXNET = (
    Mutant(
        "mxnet/finite_check.py",
        "return _finite_peak(elements) * factor > FP32.max",
        "return False",
        "a gradient that leaves float32 when it is unscaled is not applied",
        "test_unusual.py::test_a_float64_gradient_that_leaves_float32_is_skipped "
        "test_checking.py::test_what_is_used_is_checked",
    ),
    Mutant(
        "mxnet/finite_check.py",
        "    if v.dtype.itemsize < 4:\n        v = v.astype(np.float32)\n",
        "",
        "float16 gradients are added up in float32",
        "test_checking.py",
    ),
    Mutant(
        "mxnet/scaler.py",
        "        else:\n            forget(fresh)\n",
        "",
        "a gradient of a skipped step is not used later",
        "test_skipping.py::test_a_gradient_from_a_skipped_step_is_not_used_later",
    ),
    Mutant(
        "mxnet/scaler.py",
        "        trainer._optimizer.rescale_grad = share  # what",
        "        # what",
        "an optimizer that is used again carries no scale",
        "test_scaling.py::test_an_optimizer_that_is_used_again_carries_no_scale",
    ),
    Mutant(
        "mxnet/scaler.py",
        "            before.undo()\n",
        "",
        "a file that is refused leaves the trainer as it was",
        "test_state.py::test_a_file_that_is_refused_leaves_the_trainer_as_it_was",
    ),
    Mutant(
        "mxnet/weights.py",
        "nd.clip(weight, -FP16.max, FP16.max, out=weight)",
        "pass",
        "a weight never becomes inf by rounding",
        "test_masters.py::test_a_weight_whose_master_leaves_float16_stays_at_its_largest_number",
    ),
)

OBSERVE = (
    Mutant(
        "observe/torch/hooks.py",
        "        for handle in self.handles:\n            handle.remove()\n",
        "",
        "at the end everything is put back",
        "test_hooks.py::test_everything_is_put_back",
    ),
    Mutant(
        "observe/torch/hooks.py",
        "            self._failed(error)\n            return None\n        finally",
        "            self._failed(error)\n            raise\n        finally",
        "what a hook cannot read does not stop the script",
        "test_hooks.py::test_what_a_hook_cannot_read_is_noted_once_and_training_goes_on",
    ),
    Mutant(
        "observe/torch/hooks.py",
        "                kept = list(parameters)\n                is_generator",
        "                kept = parameters\n                is_generator",
        "a generator of parameters is still the script's to read",
        "test_hooks.py::test_gradients_are_looked_at_before_clipping_by_any_name_and_of_any_kind",
    ),
    Mutant(
        "observe/torch/hooks.py",
        "before_step.gradlift_reads_only = after_step.gradlift_reads_only = True",
        "before_step.gradlift_reads_only = after_step.gradlift_reads_only = False",
        "hooks that only read cost masters nothing",
        "test_hooks.py::test_hooks_that_only_read_are_known_to_masters",
    ),
    Mutant(
        "observe/torch/hooks.py",
        "if line is None or method in line.within:",
        "if line is None:",
        "a step of a scaler that calls its parent is recorded once",
        "test_hooks.py::test_a_scaler_of_ones_own_that_calls_its_parent",
    ),
    Mutant(
        "observe/torch/lines.py",
        "norm=math.sqrt(squares) / scale if",
        "norm=math.sqrt(squares) if",
        "the norm is that of the true gradients",
        "test_hooks.py::test_an_overflow_is_the_scales_and_amax_is_scaled_norm_is_not",
    ),
    Mutant(
        "session.py",
        "        set_current(self._around)\n",
        "        set_current(None)\n",
        "the run around a block goes on being recorded",
        "test_session.py::test_a_session_inside_another_records_by_itself",
    ),
)
