from slipstream.cli.main import main

main()
