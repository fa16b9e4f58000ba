"""INT8 quantisation-aware training in FP16: digits, straight-through estimator, ONNX with Q/DQ.

    python examples/qat_int8.py                    # trains three ways, exports, compares

A small CNN whose weights (per channel) and activations are rounded to INT8 in the forward pass by
torch's own FakeQuantize; gradients pass straight through. Trained in float32, in float16 with
gradlift, and in float16 without a scale; the second is exported to ONNX with QuantizeLinear and
DequantizeLinear, which is what TensorRT builds an INT8 engine from, and run by onnxruntime.
"""

from __future__ import annotations

import argparse
import copy
import os
import warnings

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.ao.quantization.observer import MovingAveragePerChannelMinMaxObserver

from gradlift.torch import GradScaler

INT8 = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8}


def per_tensor() -> FakeQuantize:
    return FakeQuantize(MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **INT8)


def per_channel() -> FakeQuantize:
    scheme = torch.per_channel_symmetric
    return FakeQuantize(MovingAveragePerChannelMinMaxObserver, qscheme=scheme, ch_axis=0, **INT8)


class Quantised(nn.Module):
    """A layer that sees its input and its weights as INT8 would hold them."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.layer, self.inputs, self.weights = layer, per_tensor(), per_channel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In float32: a scale of FakeQuantize itself may be too small for float16.
        x, weight = self.inputs(x.float()), self.weights(self.layer.weight)
        if isinstance(self.layer, nn.Linear):
            return nn.functional.linear(x, weight, self.layer.bias)
        return nn.functional.conv2d(x, weight, self.layer.bias, padding=self.layer.padding)


def network() -> nn.Sequential:
    return nn.Sequential(
        Quantised(nn.Conv2d(1, 16, 3, padding=1)),
        nn.ReLU(),
        Quantised(nn.Conv2d(16, 32, 3, padding=1)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        Quantised(nn.Linear(512, 10)),
    )


def digits() -> tuple[torch.Tensor, ...]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = torch.tensor(data.images[order] / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(data.target[order])
    return x[:1400], y[:1400], x[1400:], y[1400:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, half: bool, weight: float):
    with torch.autocast("cpu", torch.float16, enabled=half):
        out = model(x)
    return weight * nn.functional.cross_entropy(out.float(), y)


def train(how: str, seed: int, epochs: int, weight: float) -> nn.Module:
    """`how`: "float32", "gradlift" (float16), "unscaled" (float16)."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-15)
    scaler = GradScaler("cpu", rule="auto" if how == "gradlift" else "static:1")
    x, y, *_ = digits()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            scaler.train_step(
                lambda b=batch: loss_of(model, x[b], y[b], how != "float32", weight),
                optimizer,
                retries=4 if how == "gradlift" else 0,
                model=model,
            )
    return model.eval()


def accuracy(model: nn.Module) -> float:
    *_, x, y = digits()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def flushed(model: nn.Module, scale: float, weight: float) -> float:
    """Share of the gradients that float16 loses at this scale: not zero in float32, zero there."""
    x, y, *_ = digits()

    def gradients(half: bool) -> torch.Tensor:
        twin = copy.deepcopy(model)
        (loss_of(twin, x[:64], y[:64], half, weight) * (scale if half else 1)).backward()
        return torch.cat([p.grad.flatten() for p in twin.parameters()])

    true, held = gradients(False), gradients(True)
    return ((held == 0) & (true != 0)).sum().item() / (true != 0).sum().item()


class Frozen(nn.Module):
    """A FakeQuantize that looks at nothing any more: what ONNX calls Quantize and Dequantize."""

    def __init__(self, learned: FakeQuantize) -> None:
        super().__init__()
        self.per_channel, self.bounds = learned.is_per_channel, (-128, 127)
        self.register_buffer("scale", learned.scale.clone())
        self.register_buffer("zero", torch.zeros_like(learned.scale, dtype=torch.int32))
        self.one = learned.scale[0].item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.per_channel:
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero, 0, *self.bounds)
        return torch.fake_quantize_per_tensor_affine(x, self.one, 0, *self.bounds)


def export(model: nn.Module, path: str) -> nn.Module:
    """Writes `path`; returns the model as it was written."""
    model = copy.deepcopy(model).eval()
    for part in model:
        if isinstance(part, Quantised):
            part.inputs, part.weights = Frozen(part.inputs), Frozen(part.weights)
    *_, x, _ = digits()
    names = {"input_names": ["digits"], "output_names": ["scores"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # By tracing: torch.export knows no fake quantisation with a batch of any size.
        torch.onnx.export(
            model, (x[:2],), path, dynamo=False, dynamic_axes={"digits": {0: "n"}}, **names
        )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--onnx", default="qat_int8.onnx")
    parser.add_argument(
        "--weight",
        type=float,
        default=2.0**-16,
        help="of this loss, as a small term among others has",
    )
    options = parser.parse_args()
    for how in ("float32", "gradlift", "unscaled"):
        models = [train(how, s, options.epochs, options.weight) for s in range(options.seeds)]
        found = [accuracy(m) for m in models]
        print(f"{how:9} held-out accuracy", *(f"{a:.4f}" for a in found), flush=True)
        if how == "gradlift":
            kept = models[0]
    for name, scale in (("unscaled", 1.0), ("at 2^16", 2.0**16)):
        share = flushed(kept.train(), scale, options.weight)
        print(f"float16 {name}: {share:.1%} of the gradients are lost")
    kept = export(kept, options.onnx)
    *_, x, _ = digits()
    session = onnxruntime.InferenceSession(options.onnx)
    there = session.run(None, {"digits": x.numpy()})[0].argmax(1)
    with torch.no_grad():
        same = (there == kept(x).argmax(1).numpy()).mean()
    print(f"{options.onnx}: onnxruntime agrees on {same:.1%} of {len(x)} held-out digits")


if __name__ == "__main__":
    main()
