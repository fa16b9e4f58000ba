"""Faults in the JAX adapter and in the three backends of the Keras adapter."""

from __future__ import annotations

from .mutant import Mutant

JAX = (
    # the look
    Mutant(
        "jax/finite_checking.py",
        "return jnp.isinf(squares).astype(jnp.int8) + 2 * jnp.isnan(squares).astype(jnp.int8)",
        "return jnp.isinf(squares).astype(jnp.int8)",
        "NaN is found",
        "test_checking.py::test_no_bad_element_is_overlooked",
    ),
    Mutant(
        "jax/finite_checking.py",
        "        g = g.astype(jnp.float32)\n        for factor",
        "        for factor",
        "squares of float16 are added up in float32",
        "test_checking.py::test_float16_squares_are_summed_in_float32",
    ),
    Mutant(
        "jax/finite_checking.py",
        "parts = _squares(leaves, first, then)",
        "parts = _squares(leaves, then)",
        "a gradient that leaves float32 when it is unscaled is not applied",
        "test_checking.py::test_the_look_is_numpys",
    ),
    Mutant(
        "jax/finite_checking.py",
        "    return tuple(reversed(bad))",
        "    return tuple(bad)",
        "the first culprit is the one that backward reached first",
        "test_recording.py::test_culprits_of_a_result_are_those_of_its_gradients",
    ),
    # the scale of a wrapped optimizer
    Mutant(
        "jax/optimizer_wrapper.py",
        "        return _times_cotangent(x, 1 / scale) if",
        "        return x if",
        "gradients leave `scaled` without the scale",
        "test_misuse.py::test_no_mixture_of_scales_moves_the_weights_elsewhere",
    ),
    Mutant(
        "jax/optimizer_wrapper.py",
        "        if in_chain or by_name:",
        "        if by_name:",
        "a transform in front of a wrapped optimizer is refused",
        "test_misuse.py::test_a_transform_in_front_of_a_wrapped_optimizer_is_refused",
    ),
    Mutant(
        "jax/optimizer_wrapper.py",
        "        if dtype == jnp.float16:\n",
        "        if False:\n",
        "true gradients of float16 parameters are not flushed",
        "test_misuse.py::test_a_float16_parameter_is_refused_by_name_and_takes_the_other_way",
    ),
    Mutant(
        "jax/optimizer_wrapper.py",
        "        nnx.update(tree, _taken_off(nnx.state(tree), scale))\n        return tree\n",
        "        pass\n",
        "what an nnx model counts in its forward pass is kept",
        "test_models.py::test_an_nnx_step_is_the_plain_one_and_a_skip_changes_nothing",
    ),
    Mutant(
        "jax/scaler.py",
        "        amax = amax * scaler.state.scale\n",
        "        pass\n",
        "a rule sees how large gradients were as scaled",
        "test_recording.py",
    ),
    # the step
    Mutant(
        "jax/selection.py",
        "return jnp.where(condition, new, old)",
        "return old + condition * (new - old)",
        "a skipped step changes no bit",
        "test_skipping.py::test_minus_zero_survives_a_skip_on_both_routes",
    ),
    Mutant(
        "jax/selection.py",
        "if not isinstance(var, Literal) and times[var] == 1",
        "if not isinstance(var, Literal)",
        "one value in two places of the state is kept in both",
        "test_skipping.py::test_any_state_is_kept_or_moved",
    ),
    Mutant(
        "jax/scaler.py",
        "((cause != Cause.NONE) & (cause != Cause.NO_GRADIENTS))",
        "(cause != Cause.NONE)",
        "a step without gradients is not counted as skipped",
        "test_skipping.py::test_no_gradients_is_neither",
    ),
    Mutant(
        "jax/scaler.py",
        "        after = after.capped(loss_type)\n",
        "",
        "the next scale of a float16 loss is one that it can carry",
        "test_scaling.py::test_a_float16_loss_tells_the_scale_that_comes_next",
    ),
    Mutant(
        "jax/scaler.py",
        "jnp.promote_types(g.dtype, jnp.float32)) * factor",
        "g.dtype) * factor.astype(g.dtype)",
        "gradients are unscaled in float32",
        "test_scaling.py::test_gradients_of_16_bit_parameters_are_unscaled_in_float32",
    ),
    Mutant(
        "jax/scaler.py",
        "jnp.int32(loaded.steps), jnp.int32(loaded.skipped)",
        "jnp.int32(0), jnp.int32(0)",
        "counts are loaded with a state",
        "test_state.py::test_pickle_json_and_copies_keep_every_field",
    ),
    Mutant(
        "jax/application.py",
        "            stepped = stepped & ~found.nonfinite\n",
        "",
        "gradients that were spoiled after the look are not applied",
        "test_unusual.py::test_a_gradient_that_was_spoiled_after_the_look_is_not_applied",
    ),
    Mutant(
        "jax/application.py",
        "m.norm() is norm and m.together == len(marks)",
        "m.norm() is norm",
        "a part of the gradients is clipped by its own norm",
        "test_clipping.py::test_clipping_measures_what_it_is_given",
    ),
    Mutant(
        "jax/application.py",
        "    if isinstance(last, MasterState):\n",
        "    if False:\n",
        "masters are rounded into the weights",
        "test_masters.py::test_apply_rounds_masters_where_an_addition_would_miss",
    ),
    Mutant(
        "jax/masters.py",
        "jnp.clip(weights, -most, most).astype(like.dtype)",
        "weights.astype(like.dtype)",
        "a weight never becomes inf by rounding",
        "test_masters.py::test_a_weight_whose_master_leaves_its_range_stays_at_the_largest_number",
    ),
    Mutant(
        "jax/masters.py",
        "jnp.array(_wide(p), copy=True)",
        "_wide(p)",
        "parameters and masters may be donated together",
        "test_masters.py::test_masters_of_float32_leaves_can_be_donated_with_them",
    ),
    # windows, retries, devices, records
    Mutant(
        "jax/accumulation.py",
        "means = iter([total / count for total in totals])",
        "means = iter(totals)",
        "gradients of micro-batches are averaged",
        "test_windows.py::test_accumulation_is_the_mean_at_one_scale",
    ),
    Mutant(
        "jax/retrying.py",
        "        left = retries - tries\n",
        "        left = retries - tries + 1\n",
        "a batch is tried again so often and no more",
        "test_retries.py::test_retries_are_the_cores",
    ),
    Mutant(
        "jax/devices.py",
        "return lax.pmax(x, differ) if differ else x",
        "return x",
        "a loss that is bad on one device is known to all",
        "test_devices.py::test_eight_devices_decide_alike",
    ),
    Mutant(
        "jax/journaling.py",
        "if _last.get((listener, key)) != int(step):",
        "if True:",
        "a step of several devices is recorded once",
        "test_devices.py::test_on_four_devices_a_step_is_written_once_and_split_parameters_are_refused",
    ),
)

# What all backends share is put to one of them.
KERAS_TENSORFLOW = (
    Mutant(
        "keras/backends/tensorflow.py",
        "odd = ~tf.math.is_finite(squares * blown * blown) |",
        "odd = (squares * blown * blown >= float('inf')) |",
        "NaN is found",
        "test_skipping.py::test_skips_leave_no_trace",
    ),
    Mutant(
        "keras/backends/tensorflow.py",
        "sound = finite & (top * inverse <= FP32.max)",
        "sound = finite",
        "a gradient that leaves float32 when it is unscaled is not applied",
        "test_checking.py::test_what_is_used_is_what_is_checked",
    ),
    Mutant(
        "keras/backends/tensorflow.py",
        "        variable.assign(value)\n    opt._window.clear()",
        "        variable.assign(value)",
        "a loss belongs to one step",
        "test_conformance.py::test_a_non_finite_loss_keeps_the_scale",
    ),
    Mutant(
        "keras/backends/compiled.py",
        "ceiling = HALF_LOSS_CEILING if half_loss else math.inf",
        "ceiling = math.inf",
        "a float16 loss carries 2^15 at most",
        "test_scaling.py::test_a_float16_loss_carries_two_to_the_fifteen",
    ),
    Mutant(
        "keras/backends/compiled.py",
        "ops.concatenate([memory, counts + met])",
        "ops.concatenate([memory, counts])",
        "steps are counted by their cause",
        "test_conformance.py::test_skipped_steps",
    ),
    Mutant(
        "keras/step_record.py",
        "return RowReading(self.nonfinite | now.nonfinite,",
        "return RowReading(now.nonfinite,",
        "a clip by hand does not hide an overflow",
        "test_clipping.py::test_a_clip_by_hand_does_not_hide_an_overflow",
    ),
)

KERAS_JAX = (
    Mutant(
        "keras/backends/jax.py",
        "moved, inner_after = gated(sound, step, (weights, inner))",
        "moved, inner_after = step()",
        "a step that is not sound writes nothing",
        "test_skipping.py::test_skips_leave_no_trace",
    ),
    Mutant(
        "keras/backends/jax.py",
        "inner_after[i] = jnp.where(sound, inner_after[i], fresh)",
        "pass",
        'drop="window" begins the window anew',
        "test_windows.py::test_a_bad_micro_batch",
    ),
    Mutant(
        "keras/step_record.py",
        "first = max(since, self.steps - ROWS, 0)",
        "first = max(since, 0)",
        "steps that the ring no longer holds are noted, and none is told twice",
        "test_recording.py::test_missing_steps_are_noted",
    ),
    Mutant(
        "keras/scale_logger.py",
        "if self._ahead >= self.every or self._ahead + self._together > ROWS:",
        "if self._ahead + self._together > 2 * ROWS:",
        "the journal gets every step of a compiled loop",
        "test_recording.py::test_the_journal_is_complete",
    ),
)

KERAS_TORCH = (
    Mutant(
        "keras/backends/torch.py",
        "return g.float() * inverse if g.dtype in",
        "return g * inverse if g.dtype in",
        "gradients are unscaled in float32",
        "test_unusual.py::test_a_float16_gradient_is_unscaled_in_float32",
    ),
    Mutant(
        "keras/step_record.py",
        "return self.steps - self.counts[Cause.NONE] - self.counts[Cause.NO_GRADIENTS]",
        "return self.steps - self.counts[Cause.NONE]",
        "a step without gradients is not counted as skipped",
        "test_conformance.py::test_skipped_steps",
    ),
    Mutant(
        "keras/saving.py",
        "finite = ring | np.isfinite(value.astype(np.float64))",
        "finite = ring | np.ones(value.shape, bool)",
        "a stored moment that is NaN is refused",
        "test_unusual.py::test_stored_variables_of_any_make_are_refused_and_change_nothing",
    ),
    Mutant(
        "keras/saving.py",
        "    if saved.name != rule.name:\n",
        "    if False:\n",
        "the state of another rule is refused",
        "test_state.py::test_another_rules_state_is_refused",
    ),
    Mutant(
        "keras/loss_scale_optimizer.py",
        "            variable.assign(value)\n        self._window.clear()",
        "            variable.assign(value)",
        "a loaded state begins a new window",
        "test_unusual.py::test_a_state_loaded_in_the_middle_of_a_window",
    ),
    Mutant(
        "keras/loss_scale_optimizer.py",
        "        if self._conclusions.channels:\n            self.enforce()\n        super()",
        "        super()",
        "the journal has every step that a checkpoint has",
        "test_recording.py::test_the_journal_has_every_step_that_a_checkpoint_has",
    ),
    Mutant(
        "keras/pairing.py",
        "if any(_among(g, self._scaled) for g in grads):",
        "if False:",
        "gradients with the scale are not applied as true ones",
        "test_misuse.py::test_scaled_gradients_applied_after_all",
    ),
)
