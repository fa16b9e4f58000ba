"""JAX in a forked child: it must not have been used before, so that each child compiles anew."""

import tempfile

import jax

_folder = tempfile.TemporaryDirectory(prefix="gradlift-kills-jax-")


def compile_once():
    """What one child has compiled, the next finds on the disk."""
    jax.config.update("jax_compilation_cache_dir", _folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
