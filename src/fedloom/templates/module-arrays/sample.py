"""Invent data.npz: signals of eight machines, normal or worn. Replace it by your own arrays."""

import numpy as np

random = np.random.default_rng(1)
machine = np.repeat(np.arange(8), 100)  # the owner of each example; names work, too
y = random.integers(0, 2, len(machine))  # the class: 1 is a worn bearing, which adds a faster vibration
time = np.linspace(0, 2 * np.pi, 32)
speed = 1 + machine[:, None] % 4  # machines differ
x = np.sin(speed * time) + y[:, None] * np.sin(3 * speed * time + machine[:, None])
x += random.normal(scale=0.8, size=x.shape)
np.savez("data.npz", x=x[:, None].astype(np.float32), y=y, machine=machine)  # x: [n, channels, length]
