"""A member's own side of a federation: its policy, its approvals, and what it has spent."""
