"""Contextual bandit with a policy, a value baseline and an entropy bonus; RMSprop."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(70)
STATES, ACTIONS, BATCH = 8, 5, 256
pay = torch.rand(STATES, ACTIONS)
pay[torch.arange(STATES), torch.randint(ACTIONS, (STATES,))] += 1.0


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.policy = nn.Linear(48, ACTIONS)
        self.value = nn.Linear(48, 1)

    def forward(self, s):
        h = self.trunk(s)
        return self.policy(h).float(), self.value(h).float().squeeze(1)


agent = ActorCritic()
optimizer = torch.optim.RMSprop(agent.parameters(), lr=1.5e-3, alpha=0.95)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
regret = []

for episode in range(220):
    state = torch.randint(STATES, (BATCH,))
    observation = nn.functional.one_hot(state, STATES) + 0.1 * torch.randn(BATCH, STATES)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = agent(observation)
    policy = Categorical(logits=logits)
    action = policy.sample()
    reward = pay[state, action] + 0.1 * torch.randn(BATCH)

    advantage = reward - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    actor_loss = -(policy.log_prob(action) * advantage).mean()
    critic_loss = nn.functional.mse_loss(value, reward)
    loss = actor_loss + 0.5 * critic_loss - 0.01 * policy.entropy().mean()

    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    regret.append((pay.max(1).values[state] - pay[state, action]).mean().item())
    if episode % 50 == 0:
        print(f"{episode:4d} regret {regret[-1]:.3f} entropy {policy.entropy().mean().item():.3f}")

# the surrogate loss has no meaning of its own: regret is what falls
print(f"loss {sum(regret[:5]) / 5:.4f} -> {sum(regret[-5:]) / 5:.4f}")
