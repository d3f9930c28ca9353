"""Many runs, one report: settings x tasks x seeds over shared references."""
