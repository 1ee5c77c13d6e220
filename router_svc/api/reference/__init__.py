"""The reference of the HTTP API: its OpenAPI document, and a page that shows it."""
