"""Faults, tried at random: kills, cuts, hostile peers, garbage, full disks, endurance (docs/faults.md)."""
