"""What a client measures, and how a federation's measurements are summed up; workers and the round loop use it."""
