"""Guitar effects: amp is an amplifier, half a length, scale a list of notes."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Amp:
    gain: float = 2.0

    def scale(self, wave: np.ndarray) -> np.ndarray:
        return np.tanh(self.gain * wave)

    def step(self, wave: np.ndarray) -> np.ndarray:
        return self.scale(wave)

    def update(self, gain: float) -> None:
        self.gain = gain


amp = Amp()
wave = np.sin(np.linspace(0, 440 * 2 * np.pi, 44100)).astype(np.float16)
half = wave[: len(wave) // 2]
for gain in (1.0, 2.0, 4.0):
    amp.update(gain)
    loud = amp.step(half.astype(np.float32))
    print(gain, float(np.log10(np.abs(loud).max() + 1e-10)))
