"""What the scripts that train LeRobot's own policies share."""

import torch


def fit(policy, data, steps, batch_size, warm_up):
    """Train on a random batch of the windows a step, and return the last loss.

    ``warm_up`` is the share of the steps in which the learning rate rises.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=warm_up)
    for _ in range(steps):
        index = torch.randint(len(data["action"]), (batch_size,))
        batch = {key: value[index] for key, value in data.items()}
        batch["action_is_pad"] = torch.zeros(batch["action"].shape[:2], dtype=torch.bool)
        loss, _ = policy.forward(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def save(folder, *parts):
    """Write a policy and its processors into one folder, as LeRobot does."""
    for part in parts:
        part.save_pretrained(folder)
