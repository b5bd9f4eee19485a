"""Invent hospital-a/patients.csv and hospital-b/patients.csv. In a federation each hospital has its own table."""

import csv
import random
from pathlib import Path

for hospital, older in (("hospital-a", 0), ("hospital-b", 15)):
    draw = random.Random(hospital)
    Path(hospital).mkdir(exist_ok=True)
    with Path(hospital, "patients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "pulse", "pressure", "label"])
        for _ in range(300):
            age, pulse, pressure = draw.gauss(50 + older, 12), draw.gauss(75, 10), draw.gauss(130, 15)
            risk = (age - 50 - older) / 12 + (pulse - 75) / 10 + draw.gauss(0, 0.5)
            table.writerow([round(age), round(pulse), round(pressure), "yes" if risk > 0 else "no"])
