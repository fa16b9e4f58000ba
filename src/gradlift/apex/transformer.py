"""`apex.transformer`: refused when it is imported."""

raise ImportError(
    "apex.transformer is not here: it splits a model over ranks, and gradlift only scales losses. "
    "Use megatron.core from the package megatron-core, where it comes from, or "
    "torch.distributed.tensor.parallel; gradlift.torch.GradScaler(process_group=...) makes their "
    "ranks agree on each step",
    name=__name__,
)
