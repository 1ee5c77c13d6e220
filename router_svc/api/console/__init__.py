"""The console: a page that shows the cluster and its requests, and the stream of states that feeds it."""
