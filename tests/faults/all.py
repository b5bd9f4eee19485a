"""All faults, in the order of the table."""

from faults import attacks, cuts, disks, endurance, fuzz, kills, machine
from faults.table import Fault

FAULTS: tuple[Fault, ...] = (
    *kills.FAULTS,
    *cuts.FAULTS,
    *attacks.FAULTS,
    *fuzz.FAULTS,
    *machine.FAULTS,
    *disks.FAULTS,
    *endurance.FAULTS,
)
