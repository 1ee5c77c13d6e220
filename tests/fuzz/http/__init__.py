"""HTTP of strangers: requests made from the OpenAPI document, and bytes that are hardly HTTP."""
