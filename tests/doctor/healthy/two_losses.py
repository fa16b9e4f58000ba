"""Denoising autoencoder whose code also predicts the class: two terms, two backward passes."""

import torch
from torch import nn

torch.manual_seed(17)
prototypes = torch.randn(5, 40)


def sample(n=64):
    y = torch.randint(5, (n,))
    clean = prototypes[y] + 0.3 * torch.randn(n, 40)
    return clean, clean + 0.4 * torch.randn(n, 40), y


encoder = nn.Sequential(nn.Linear(40, 32), nn.ELU(), nn.Linear(32, 8))
decoder = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 40))
classifier = nn.Linear(8, 5)
parameters = [p for m in (encoder, decoder, classifier) for p in m.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

totals = []
for _ in range(200):
    clean, noisy, y = sample()
    optimizer.zero_grad(set_to_none=True)

    with torch.autocast("cpu", dtype=torch.float16):
        restored = decoder(encoder(noisy))
    reconstruction = nn.functional.smooth_l1_loss(restored.float(), clean)
    scaler.scale(reconstruction).backward()

    # the class is read from the clean input; its gradient is added to the one above
    with torch.autocast("cpu", dtype=torch.float16):
        logits = classifier(encoder(clean))
    classification = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(0.2 * classification).backward()

    scaler.step(optimizer)
    scaler.update()
    totals.append(reconstruction.item() + 0.2 * classification.item())

print(f"loss {sum(totals[:5]) / 5:.4f} -> {sum(totals[-5:]) / 5:.4f}")
