import torch
from lightning.pytorch import LightningModule, Trainer


class Painter(LightningModule):
    def __init__(self, generator, critic):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = generator, critic

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-4),
            torch.optim.Adam(self.critic.parameters(), lr=4e-4),
        )

    def training_step(self, batch, batch_idx):
        opt_g, opt_c = self.optimizers()
        fake = self.generator(torch.randn(len(batch), 64, device=self.device))
        c_loss = (1 - self.critic(batch).float()).relu().mean() + (1 + self.critic(fake.detach()).float()).relu().mean()
        opt_c.zero_grad()
        self.manual_backward(c_loss)
        opt_c.step()
        g_loss = -self.critic(fake).float().mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()


def main(generator, critic, loader):
    Trainer(precision="16-mixed", max_steps=10000).fit(Painter(generator, critic), loader)
