"""Running parity by an LSTM; training starts with short sequences and moves on to longer ones."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STAGES = [(2, 60), (4, 50), (7, 50)]  # longest sequence, optimizer steps


class Parity(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, bits, lengths):
        packed = pack_padded_sequence(bits, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        hidden, _ = pad_packed_sequence(hidden, batch_first=True, total_length=bits.shape[1])
        return self.out(hidden)


def sample(longest, n=64):
    lengths = torch.randint(1, longest + 1, (n,))
    lengths[0] = longest
    valid = torch.arange(longest)[None] < lengths[:, None]
    bits = torch.randint(2, (n, longest)) * valid
    return bits[..., None].float(), lengths, valid, (bits.cumsum(1) % 2).float()


def main():
    torch.manual_seed(73)
    model = Parity()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for longest, steps in STAGES:
        for _ in range(steps):
            bits, lengths, valid, parity = sample(longest)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(bits, lengths)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits.float().squeeze(2)[valid], parity[valid]
            )
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        print(f"up to {longest} bits: {sum(losses[-5:]) / 5:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
