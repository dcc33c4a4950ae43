"""Real systemd, real kubelets, real runtimes. Needs root: `make e2e`."""
