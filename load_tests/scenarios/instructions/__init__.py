"""Instructions that a router executes for a request, which do not depend on the speed of the machine."""
