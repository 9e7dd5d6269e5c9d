import torch


def play(environment, actor, num_steps):
    state = environment.reset()
    for _ in range(num_steps):
        action = actor.choose(state)
        state, reward, done = environment.step(action)
        if done:
            state = environment.reset()
    return action.state_dict() if hasattr(action, "state_dict") else action


def learn(environment, actor, opt, scaler, num_steps):
    for _ in range(num_steps):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = actor.loss(environment)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    torch.save({"action": play(environment, actor, num_steps)}, "action.pt")
