"""Images, compose files, Kubernetes manifests and monitoring: checked as files, and run for real where tools are.

Checks of files run with all other tests. What needs an engine, Prometheus, promtool or a browser is marked `deploy`
and runs with `make test-deploy`.
"""
