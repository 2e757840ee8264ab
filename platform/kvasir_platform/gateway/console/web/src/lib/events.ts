// The events of a streamed answer (server-sent events), as they come.

export interface ServerEvent {
  name: string;
  data: string;
}

export async function* events(reply: Response): AsyncGenerator<ServerEvent> {
  if (reply.body === null) return;
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data: string[] = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data.push(line.slice(6));
      else if (line.trim() === "") {
        if (data.length > 0) yield { name, data: data.join("\n") };
        name = "";
        data = [];
      }
    }
  }
}
