"""Stateful RNN that predicts the next sample of many parallel machine signals."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SignalRNN(nn.Module):
    def __init__(self, batch, hidden=32):
        super().__init__()
        self.rnn = nn.RNN(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)
        self.register_buffer("h", torch.zeros(1, batch, hidden))

    def forward(self, x):
        y, h = self.rnn(x, self.h)
        self.h = h.detach()
        return self.out(y)


def signals(n=610, length=25):
    phase = 6.2832 * torch.rand(n, 1)
    rate = 0.3 + 0.4 * torch.rand(n, 1)
    wave = torch.sin(phase + rate * torch.arange(length)) + 0.05 * torch.randn(n, length)
    return TensorDataset(wave[:, :-1, None], wave[:, 1:, None])


def main():
    torch.manual_seed(88)
    loader = DataLoader(signals(), batch_size=32, shuffle=True)
    model = SignalRNN(batch=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for epoch in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                pred = model(x)
            loss = nn.functional.mse_loss(pred.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        print(f"epoch {epoch}: {losses[-1]:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
