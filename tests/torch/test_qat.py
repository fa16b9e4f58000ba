"""examples/qat_int8.py: float16 with gradlift learns what float32 learns; onnxruntime agrees."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

EXAMPLE = Path(__file__).parents[2] / "examples" / "qat_int8.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qat")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--seeds", "2", "--epochs", "3", "--onnx", "net.onnx"],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, folder / "net.onnx"


def accuracies(text, how):
    line = re.search(rf"^{how} +held-out accuracy (.+)$", text, re.M)[1]
    return [float(x) for x in line.split()]


def test_float16_with_gradlift_reaches_float32(told):
    """Within seed noise: two seeds of float32 itself are about two points apart."""
    full, ours = accuracies(told[0], "float32"), accuracies(told[0], "gradlift")
    assert min(full) > 0.85
    assert all(abs(a - b) < 0.03 for a, b in zip(full, ours, strict=True))


def test_without_a_scale_it_does_not_learn(told):
    assert max(accuracies(told[0], "unscaled")) < 0.6
    lost = re.findall(r"float16 (.+): ([\d.]+)% of the gradients are lost", told[0])
    assert [name for name, _ in lost] == ["unscaled", "at 2^16"]
    assert float(lost[0][1]) > 30
    assert float(lost[1][1]) < 1


def test_the_export_has_quantise_nodes_and_the_same_predictions(told):
    text, path = told
    nodes = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert nodes["QuantizeLinear"] == nodes["DequantizeLinear"] == 6  # inputs, weights, 3 layers
    assert float(re.search(r"agrees on ([\d.]+)%", text)[1]) > 99.7  # all but one, for a tie


def test_the_export_is_what_tensorrt_takes(told):
    """Symmetric INT8: activations per tensor, weights per output channel."""
    graph = onnx.load(told[1]).graph
    held = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    made = [n for n in graph.node if n.op_type == "Constant"]
    held |= {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in made}
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        nodes = [n for n in graph.node if n.op_type == kind]
        zeros = [held[n.input[2]] for n in nodes]
        assert all(z.dtype == np.int8 and not z.any() for z in zeros)
        shapes = [held[n.input[1]].shape for n in nodes]
        assert sorted(shapes) == [(), (), (), (10,), (16,), (32,)]
        axes = [n.attribute[0].i for n, shape in zip(nodes, shapes, strict=True) if shape]
        assert axes == [0, 0, 0]
