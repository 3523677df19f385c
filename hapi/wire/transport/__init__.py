"""A way to a server: requests, answers, and the errors of sockets and HTTP. The one seam at the network."""
