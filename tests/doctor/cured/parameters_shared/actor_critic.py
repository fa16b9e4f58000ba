"""Actor-critic on a contextual bandit with a shared trunk."""

import torch
from torch import nn

torch.manual_seed(64)
ACTIONS, STATE = 5, 10
payoff = torch.randn(STATE, ACTIONS)


class ActorCritic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, width), nn.ReLU(), nn.Linear(width, width))
        self.actor = nn.Linear(width, ACTIONS)
        self.critic = nn.Linear(width, 1)

    def forward(self, state):
        h = torch.relu(self.trunk(state))
        return self.actor(h), self.critic(h).squeeze(-1)


agent = ActorCritic()
trunk = list(agent.trunk.parameters())
actor_opt = torch.optim.Adam(trunk + list(agent.actor.parameters()), lr=6e-2)
critic_opt = torch.optim.Adam(agent.critic.parameters(), lr=6e-2)
scaler = torch.amp.GradScaler("cpu")

regret = []
for update in range(300):
    state = torch.randn(128, STATE)
    with torch.autocast("cpu", torch.float16):
        logits, value = agent(state)
    policy = torch.distributions.Categorical(logits=logits.float())
    action = policy.sample()
    table = torch.tanh(state @ payoff)
    reward = table[torch.arange(128), action]
    advantage = reward - value.float()

    actor_loss = -(policy.log_prob(action) * advantage.detach()).mean()
    critic_loss = advantage.pow(2).mean()
    entropy = policy.entropy().mean()
    loss = actor_loss + 0.5 * critic_loss - 0.01 * entropy

    agent.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(actor_opt)
    scaler.step(critic_opt)
    scaler.update()
    regret.append((table.amax(1) - reward).mean().item())
    if update % 60 == 0:
        print(f"update {update}: regret {regret[-1]:.3f} entropy {entropy.item():.3f}")

print(f"loss {sum(regret[:10]) / 10:.4f} -> {sum(regret[-10:]) / 10:.4f}")
