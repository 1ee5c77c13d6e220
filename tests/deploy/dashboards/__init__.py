"""The sources of k8s/monitoring/dashboards: one module for each dashboard, written by `make dashboards`."""
