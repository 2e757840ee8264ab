"""`python -m load_tests.scenarios.alerts`."""

from load_tests.scenarios.alerts.recognition import main

if __name__ == "__main__":
    main()
