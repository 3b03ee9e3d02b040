"""Access: the tenant that a token names, and the statistics that a tenant may see."""
