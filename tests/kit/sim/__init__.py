"""What tests of the simulator use."""
