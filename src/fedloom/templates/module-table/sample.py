"""Invent patients.csv: who of six hospitals' patients is readmitted. Replace it by your own table."""

import csv
import random
from pathlib import Path

draw = random.Random(1)
with Path("patients.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["hospital", "age", "pulse", "pressure", "readmitted"])
    for hospital in range(6):
        for _ in range(120):
            age, pulse, pressure = draw.gauss(45 + 5 * hospital, 12), draw.gauss(75, 10), draw.gauss(130, 15)
            risk = (age - 45 - 5 * hospital) / 12 + (pulse - 75) / 10 + draw.gauss(0, 0.5)
            row = [f"hospital-{hospital}", round(age), round(pulse), round(pressure), "yes" if risk > 0 else "no"]
            table.writerow(row)
