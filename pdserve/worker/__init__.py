"""What prefill and decode processes share above engine and transfer: sizing, metrics, start and drain."""
