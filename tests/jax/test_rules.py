"""Rules on JAX arrays, eager and jitted, and beside jmp's and flax's own."""

import random

import jax
import jax.numpy as jnp
import jmp
import pytest
from conformance import exact
from flax.training.dynamic_scale import DynamicScale

from gradlift import Reading, rules

SEEDS, STEPS = range(3), 3000


@pytest.mark.parametrize("rule", exact.EVERY)
def test_rules_give_the_same_bits_jitted(rule):
    exact.check(rule, jnp, lambda x, kind: jnp.asarray(x, kind), jax.jit)


@pytest.mark.parametrize("rule", ["dynamic", "auto"])
def test_rules_give_the_same_bits_eager(rule, monkeypatch):
    monkeypatch.setattr(exact, "STEPS", 60)
    exact.check(rule, jnp, lambda x, kind: jnp.asarray(x, kind))


def test_a_state_can_be_carried_by_scan():
    """Same structure, shapes, types and weak types in and out."""
    for name in exact.EVERY:
        rule = rules.parse(name)
        state = jax.tree.map(jnp.asarray, rule.init())
        state = state._replace(scale=jnp.float32(state.scale))
        state = type(state)(state[0], *(jnp.int32(x) for x in state[1:]))

        def body(state, overflow, rule=rule):
            return rule.advance(state, Reading(overflow, jnp.float32(1)), jnp), state.scale

        _, scales = jax.lax.scan(body, state, jnp.array([True, False, True]))
        assert scales.shape == (3,)


@pytest.mark.parametrize("seed", SEEDS)
def test_jmp_preset_is_jmps_class(seed):
    rule = rules.preset("jmp", growth_interval=5)
    state, peer = rule.init(), jmp.DynamicLossScale(jnp.float32(2.0**15), period=5)
    adjust = jax.jit(lambda peer, finite: peer.adjust(finite))
    rng = random.Random(seed)
    for step in range(STEPS):
        overflow = exact.overflows(rng, state.scale)
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        peer = adjust(peer, jnp.array(not overflow))
        assert state.scale == float(peer.loss_scale), f"step {step}"


@pytest.mark.parametrize("seed", SEEDS)
def test_flax_preset_is_flaxs_class(seed):
    rule = rules.preset("flax", growth_interval=5)
    state, peer = rule.init(), DynamicScale(growth_interval=5)

    @jax.jit
    def update(peer, overflow):
        gradient = jnp.where(overflow, jnp.inf, 1.0)
        return peer.value_and_grad(lambda x: gradient * x)(1.0)[0]

    rng = random.Random(seed)
    for step in range(STEPS):
        overflow = exact.overflows(rng, state.scale)
        state = rule.advance(state, Reading(nonfinite=overflow, amax=1.0))
        peer = update(peer, overflow)
        assert state.scale == float(peer.scale), f"step {step}"
