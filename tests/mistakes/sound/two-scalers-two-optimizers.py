import torch
import torch.nn.functional as F


class Game:
    def __init__(self, gen, disc):
        self.gen, self.disc = gen.cuda(), disc.cuda()
        self.opt_g = torch.optim.Adam(gen.parameters(), lr=1e-4)
        self.opt_d = torch.optim.Adam(disc.parameters(), lr=4e-4)
        self.scaler_g, self.scaler_d = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")

    def play(self, real):
        noise = torch.randn(len(real), 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.gen(noise)
            r, f = self.disc(real), self.disc(fake.detach())
        self.opt_d.zero_grad()
        self.scaler_d.scale(F.softplus(-r.float()).mean() + F.softplus(f.float()).mean()).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()
        with torch.autocast("cuda", dtype=torch.float16):
            again = self.disc(fake)
        self.opt_g.zero_grad()
        self.scaler_g.scale(F.softplus(-again.float()).mean()).backward()
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()

    def state_dict(self):
        parts = ("gen", "disc", "opt_g", "opt_d", "scaler_g", "scaler_d")
        return {name: getattr(self, name).state_dict() for name in parts}
