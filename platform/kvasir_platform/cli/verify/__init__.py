"""`kvasir verify`: measures a running deployment, and checks that its answers are right."""
