"""Lines as trainers print them."""

STAMP = "[2026-11-19 04:21:51,848] [INFO] "
DS = STAMP + "[loss_scaler.py:266:update_scale] [deepspeed] OVERFLOW! Rank {rank} Skipping step. "


def deepspeed(scale, after, rank=0):
    return DS.format(rank=rank) + f"Attempted loss scale: {scale}, reducing to {after}"


def deepspeed_step(step, skipped, lr=0.01):
    return STAMP + f"[logging.py:123:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[{lr}]"


def megatron(i, loss=None, scale=65536.0, norm=None, skipped=0, bad=0, lr=1e-4):
    """Fields that were not known are left out, as Megatron does."""
    fields = [
        f" [2026-11-19 04:21:51] iteration {i:8}/  250000",
        f" consumed samples: {1024 * i:12}",
        " elapsed time per iteration (ms): 86545.2",
        f" learning rate: {lr:.6E}",
        " global batch size:  1024",
        *([] if loss is None else [f" lm loss: {loss:.6E}"]),
        f" loss scale: {scale:.1f}",
        *([] if norm is None else [f" grad norm: {norm:.3f}"]),
        f" number of skipped iterations: {skipped:3}",
        f" number of nan iterations: {bad:3}",
    ]
    return " |".join(fields) + " |"


def trainer(loss, norm, lr="0.001", quoted=True):
    """transformers 5 quotes its numbers, 4 does not."""
    mark = "'" if quoted else ""
    facts = {"loss": loss, "grad_norm": norm, "learning_rate": lr, "epoch": "0.1"}
    return "{" + ", ".join(f"'{k}': {mark}{v}{mark}" for k, v in facts.items()) + "}"


def bar(done, of=2724):
    share = 100 * done // of
    return f" {share:2}%|#         | {done}/{of} [9:12:40<91:10:10, 132.61s/it]"


def file(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
