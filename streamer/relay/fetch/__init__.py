"""Parts on their way into their stages: request, retry, resume, a second request for a late one."""
