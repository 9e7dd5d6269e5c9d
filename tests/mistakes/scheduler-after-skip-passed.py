import torch


class Loop:
    def __init__(self, speaker_net, criterion, optimizer, lr_scheduler):
        self.speaker_net, self.criterion = speaker_net, criterion
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.amp_scaler = torch.amp.GradScaler("cuda")

    def run(self, utterances):
        for wave, speaker in utterances:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.criterion(self.speaker_net(wave.cuda()), speaker.cuda())
            self.amp_scaler.scale(loss).backward()
            scale = self.amp_scaler.get_scale()
            self.amp_scaler.step(self.optimizer)
            self.amp_scaler.update()
            self.lr_scheduler.step()  # HS303
