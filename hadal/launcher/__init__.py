"""The launcher behind `hadal run`: it starts processes on hosts, watches and ends them."""
