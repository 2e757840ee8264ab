"""`kvasir plan`: its options, what it reads, and the forms of its report."""
