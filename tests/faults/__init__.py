"""Random fault injection: kills, cuts, hostile peers, garbage, full disks, endurance (docs/e2e.md)."""
