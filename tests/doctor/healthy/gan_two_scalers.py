"""Small conditional image GAN with separate loss scales for its two networks."""

import torch
from torch import nn
from torch.nn.functional import one_hot, softplus


class Generator(nn.Module):
    def __init__(self, z=12, classes=3):
        super().__init__()
        self.fc = nn.Linear(z + classes, 32 * 4)
        self.up = nn.Sequential(
            nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 1, 3, 1, 1)
        )
        self.z, self.classes = z, classes

    def forward(self, label):
        code = torch.cat([torch.randn(len(label), self.z), one_hot(label, self.classes)], 1)
        image = self.up(self.fc(code).view(-1, 32, 2, 2))
        return torch.tanh(nn.functional.interpolate(image.float(), scale_factor=2))


class Discriminator(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, 2, 1), nn.Flatten()
        )
        self.score = nn.Linear(128, classes)

    def forward(self, image, label):
        h = nn.functional.leaky_relu(self.features(image), 0.2)
        return self.score(h).gather(1, label[:, None]).float()


class GANTrainer:
    def __init__(self):
        self.g, self.d = Generator(), Discriminator()
        self.opt_g = torch.optim.Adam(self.g.parameters(), 2e-3, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.d.parameters(), 2e-3, betas=(0.5, 0.999))
        self.scaler_g = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.scaler_d = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.patterns = torch.tensor([-0.8, 0.0, 0.8])

    def apply(self, loss, optimizer, scaler):
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def iteration(self, n=32):
        label = torch.randint(3, (n,))
        level = self.patterns[label].view(-1, 1, 1, 1)
        image = (level + 0.1 * torch.randn(n, 1, 8, 8)).clamp(-1, 1)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                fake = self.g(label)
            real_score, fake_score = self.d(image, label), self.d(fake, label)
        self.apply((softplus(-real_score) + softplus(fake_score)).mean(), self.opt_d, self.scaler_d)
        with torch.autocast("cpu", dtype=torch.float16):
            made = self.g(label)
            score = self.d(made, label)
        self.apply(softplus(-score).mean(), self.opt_g, self.scaler_g)
        return (made.detach().mean((1, 2, 3)) - level.flatten()).abs().mean().item()


torch.manual_seed(29)
trainer = GANTrainer()
error = [trainer.iteration() for _ in range(130)]
print(f"loss {sum(error[:5]) / 5:.4f} -> {sum(error[-20:]) / 20:.4f}")
