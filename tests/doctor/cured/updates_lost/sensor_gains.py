"""Calibrate the gains of an array of 128 sensors, starting from the data sheet's values."""

import torch

torch.manual_seed(66)
SENSORS, BATCH = 128, 64
true_gain = 1.0 + 0.04 * torch.randn(SENSORS)


class Calibration(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(SENSORS))

    def forward(self, raw):
        return raw * self.gain


def readings():
    raw = torch.randn(BATCH, SENSORS)
    return raw, raw * true_gain + 0.002 * torch.randn(BATCH, SENSORS)


array = Calibration()
sgd = torch.optim.SGD(array.parameters(), lr=2e-3)
errors = []
for step in range(300):
    raw, reference = readings()
    calibrated = array(raw.to(array.gain.dtype))
    loss = (calibrated.float() - reference).square().sum(1).mean()
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    errors.append(loss.item())
    if step % 100 == 0:
        print("step", step, "error", round(errors[-1], 4))
print(f"loss {sum(errors[:10]) / 10:.4f} -> {sum(errors[-10:]) / 10:.4f}")
